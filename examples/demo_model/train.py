"""Trains the demo model: a 6-layer Qwen2-MoE of 11 M parameters, on two CPU cores, for a given time.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/demo_model/train.py --work out/demo --out examples/demo_model

One process a core, which meet once a step to average gradients: on a machine that does other work too, two threads of
one process would wait for each other at every operation. Without torchrun it is one process.

The learning rate follows the clock: warm-up, plateau, linear decay over the last quarter, so that a slower machine
ends at the same time with fewer steps. Killed and started again, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import experts  # noqa: F401  (registers "padded_grouped_mm")
import torch
import torch.distributed as dist
from data import DOMAINS, PackedSampler, encode_domain
from losses import ChunkedCrossEntropy, LoadBalance
from optimizer import MuonAdamW
from tokenizer import train_tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

WARMUP = 0.02
DECAY = 0.25


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2MoeConfig:
    """22.6 MB in bf16, of which routed experts 14.2 MB; sizes are multiples of 8, which grouped_mm needs."""
    return Qwen2MoeConfig(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=192,
        intermediate_size=384,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def schedule(progress: float) -> float:
    """The learning rate's factor at a share of the training time."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return min(1.0, 0.02 + 0.98 * max(1 - progress, 0.0) / DECAY)


class Trainer:
    """The training state, which a checkpoint holds whole: weights, optimizer, time spent, tokens seen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.sequences = args.sequences // self.ranks
        torch.manual_seed(args.seed)
        args.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        self.model = Qwen2MoeForCausalLM(model_config(self.tokenizer)).bfloat16().train()
        self.model.set_experts_implementation("padded_grouped_mm")
        self.optimizer = MuonAdamW(self.model, muon_scale=args.muon_scale, weight_decay=args.weight_decay)
        self.balance = LoadBalance(self.model)
        self.seconds = 0.0
        self.tokens = 0
        self.log: list[dict[str, float]] = []
        checkpoint = args.work / "checkpoint.pt"
        if checkpoint.exists():
            self._resume(checkpoint)
        streams = {domain: encode_domain(self.tokenizer, domain) for domain in DOMAINS}
        seed = args.seed + self.optimizer.steps * self.ranks + self.rank
        self.sampler = PackedSampler(streams, args.length, args.domain_exponent, seed)
        self.long_sampler = PackedSampler(streams, 2 * args.length, args.domain_exponent, seed)

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        folder = self.args.work / "tokenizer"
        if self.rank == 0 and not folder.exists():
            train_tokenizer().save_pretrained(folder)
        if self.ranks > 1:
            dist.barrier()
        return AutoTokenizer.from_pretrained(folder)

    def loss(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cross-entropy, balance loss and expert loads of packed sequences [B, length + 1]."""
        hidden = self.model.model(batch[:, :-1], use_cache=False).last_hidden_state
        targets = batch[:, 1:].reshape(-1)
        weight = self.model.lm_head.weight
        loss = ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, targets, 1024)
        return loss, *self.balance.pop()

    def step(self) -> dict[str, float]:
        """One optimizer step over `sequences` windows; returns what the log shows."""
        progress = self.seconds / (self.args.minutes * 60)
        learning_rate = self.args.learning_rate * schedule(progress)
        # Windows of twice the length while the rate decays teach the later positions at little cost.
        if progress < 1 - DECAY:
            batch = torch.from_numpy(self.sampler.batch(self.sequences))
        else:
            batch = torch.from_numpy(self.long_sampler.batch(self.sequences // 2))
        loss, balance, loads = self.loss(batch)
        (loss + self.model.config.router_aux_loss_coef * balance).backward()
        self._average_gradients()
        norm = self.optimizer.step(learning_rate)
        self.tokens += (batch.numel() - len(batch)) * self.ranks
        return {
            "loss": loss.item(),
            "balance": balance.item(),
            "smallest_load": loads.min().item() * loads.shape[-1],
            "gradient_norm": norm,
            "learning_rate": learning_rate,
        }

    def _average_gradients(self) -> None:
        if self.ranks == 1:
            return
        gradients = [p.grad for p in self.model.parameters()]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.ranks
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _advance_clock(self, elapsed: float) -> None:
        """Rank 0's clock is everyone's, so that all ranks use the same rate and stop together."""
        clock = torch.tensor([self.seconds + elapsed], dtype=torch.float64)
        if self.ranks > 1:
            dist.broadcast(clock, src=0)
        self.seconds = clock.item()

    def run(self) -> None:
        """Steps until the time is up, with a line every 20 steps and a checkpoint every few minutes."""
        budget, last, saved = self.args.minutes * 60, time.monotonic(), self.seconds
        smooth = math.nan
        while self.seconds < budget:
            shown = self.step()
            now = time.monotonic()
            self._advance_clock(now - last)
            last = now
            smooth = shown["loss"] if math.isnan(smooth) else 0.95 * smooth + 0.05 * shown["loss"]
            if self.rank == 0 and self.optimizer.steps % 20 == 0:
                row = {"step": self.optimizer.steps, "seconds": self.seconds, "tokens": self.tokens}
                self.log.append({key: float(f"{value:.5g}") for key, value in (row | shown).items()})
                rate = self.tokens / self.seconds
                values = " ".join(f"{key} {value:.4g}" for key, value in shown.items())
                print(
                    f"step {row['step']} {self.seconds / 60:.1f} min {rate:.0f} tok/s ({smooth:.3f}) {values}",
                    flush=True,
                )
            if self.seconds - saved > self.args.save_minutes * 60:
                self.save()
                saved = self.seconds
        self.save()

    def save(self) -> None:
        """A checkpoint to go on from, and `latest/`, which `from_pretrained` loads."""
        if self.rank > 0:
            return
        partial = self.args.work / "checkpoint.part"
        state = {"optimizer": self.optimizer.state_dict(), "log": self.log}
        torch.save(state | {"seconds": self.seconds, "tokens": self.tokens}, partial)
        partial.replace(self.args.work / "checkpoint.pt")
        self.export(self.args.work / "latest")

    def _resume(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.tokens, self.log = state["seconds"], state["tokens"], state["log"]
        print(f"resumed at step {self.optimizer.steps}, {self.seconds / 60:.1f} minutes", flush=True)

    def export(self, folder: Path) -> None:
        """The model as others load it: sharded bf16 weights, tokenizer, and how it was trained."""
        self.model.generation_config = GenerationConfig(
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            do_sample=False,
            max_new_tokens=64,
        )
        self.model.save_pretrained(folder, max_shard_size="10MB")
        shutil.copytree(self.args.work / "tokenizer", folder, dirs_exist_ok=True)
        facts = {
            "steps": self.optimizer.steps,
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "tokens_per_step": self.args.sequences * self.args.length,
            "sequence_length": self.args.length,
            "learning_rate": self.args.learning_rate,
            "muon_scale": self.args.muon_scale,
            "weight_decay": self.args.weight_decay,
            "domain_exponent": self.args.domain_exponent,
            "domain_share": {n: round(float(s), 4) for n, s in zip(DOMAINS, self.sampler.shares, strict=True)},
            "log": self.log[:: max(1, len(self.log) // 50)],
        }
        (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=84)
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and the latest loadable model")
    parser.add_argument("--out", type=Path, help="where the finished model goes")
    parser.add_argument("--save-minutes", type=float, default=6)
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--muon-scale", type=float, default=2.0)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--domain-exponent", type=float, default=0.75)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    trainer = Trainer(args)
    trainer.run()
    if args.out and trainer.rank == 0:
        trainer.export(args.out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
