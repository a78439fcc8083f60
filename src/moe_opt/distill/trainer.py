"""A Transformers `Trainer` whose model is the students alone; the teacher lives in the objective, outside of it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from moe_opt.distill.config import DistillConfig, StageSettings
from moe_opt.distill.data import collate
from moe_opt.distill.muon import MuonAdamW
from moe_opt.distill.objectives import Objective
from moe_opt.distill.students import Students
from moe_opt.errors import ConfigError


class DistillTrainer(Trainer):
    """`Trainer` with its own step: losses and gradients come from the objective, and gradients are averaged over the
    processes once per optimizer step (the wrapper that accelerate puts around the model never sees a forward).

    `self.objective` is a plain attribute: it is in no state dict, no optimizer and no checkpoint.
    """

    def __init__(self, students: Students, objective: Objective, muon: bool = False, **kwargs: Any) -> None:
        super().__init__(model=students, data_collator=collate, **kwargs)
        self.objective = objective
        self._muon = muon
        self._way_losses: dict[int, list[torch.Tensor]] = {way: [] for way in students.ways}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if not self._muon:
            return super().create_optimizer(*args, **kwargs)
        if getattr(self, "optimizer", None) is None:
            self.optimizer = MuonAdamW(
                self.model.parameters(),
                self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                weight_decay=self.args.weight_decay,
            )
        return self.optimizer

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # the data is in its final order already

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: Any = None) -> Any:
        students: Students = self.accelerator.unwrap_model(model)
        students.train()
        inputs = self._prepare_inputs(inputs)
        share = 1.0 / self.current_gradient_accumulation_steps

        def backward(loss: torch.Tensor) -> None:
            scaler = self.accelerator.scaler
            scaled = loss * share
            (scaled if scaler is None else scaler.scale(scaled)).backward()

        losses = self.objective(students, inputs["input_ids"], inputs["position"], backward)
        if self.accelerator.sync_gradients:
            self._average_gradients(students)
        for way, loss in losses.items():
            self._way_losses[way].append(loss)
        return torch.stack([loss.to(self.args.device) for loss in losses.values()]).sum() * share

    def _average_gradients(self, students: Students) -> None:
        if self.accelerator.num_processes == 1:
            return
        for parameter in students.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # on this process nothing was delegated to it
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.accelerator.num_processes

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            for way, losses in self._way_losses.items():
                if losses:
                    mean = torch.stack([loss.to(self.args.device) for loss in losses]).mean()
                    if self.accelerator.num_processes > 1:
                        mean = self.accelerator.reduce(mean, "mean")
                    logs[f"loss_ways_{way}"] = round(float(mean), 6)
                    losses.clear()
        super().log(logs, *args, **kwargs)


class ProgressLines(TrainerCallback):
    """One line per log entry: where the stage is, its losses and when it will be done."""

    def __init__(self, stage: str, tokens_per_step: int) -> None:
        self.stage = stage
        self.tokens_per_step = tokens_per_step
        self.started = 0.0
        self.first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()
        self.first_step = state.global_step
        if state.global_step and state.is_world_process_zero:
            print(f"[{self.stage}] goes on at step {state.global_step} of {state.max_steps}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        done = state.global_step - self.first_step
        seconds = time.monotonic() - self.started
        left = seconds / max(done, 1) * (state.max_steps - state.global_step)
        ways = " ".join(f"{key.removeprefix('loss_')} {value:.4f}" for key, value in logs.items() if "loss_ways" in key)
        print(
            f"[{self.stage}] step {state.global_step}/{state.max_steps} loss {float(logs['loss']):.4f} ({ways}) "
            f"{self.tokens_per_step * done / max(seconds, 1e-9):,.0f} tokens/s, {_clock(left)} left",
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def training_arguments(config: DistillConfig, stage: StageSettings, folder: str) -> TrainingArguments:
    """The recipe as `TrainingArguments`; `training.options` has the last word.

    Raises:
        ConfigError: an option that `TrainingArguments` does not have, or a value that it refuses.
    """
    training = config.training
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": stage.steps,
        "learning_rate": stage.learning_rate,
        "per_device_train_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation,
        "lr_scheduler_type": training.schedule,
        "warmup_steps": round(training.warmup * stage.steps),
        "max_grad_norm": training.max_grad_norm,
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "save_steps": training.save_steps,
        "save_total_limit": 2,
        "logging_steps": training.logging_steps,
        "seed": training.seed,
        "use_cpu": training.use_cpu or not torch.cuda.is_available(),
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": torch.cuda.is_available() and not training.use_cpu,
        "remove_unused_columns": False,
        "report_to": [],
        "disable_tqdm": True,
        **training.options,
    }
    try:
        return TrainingArguments(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"recipe: training does not make valid TrainingArguments: {error}") from error


def check_processes(expected: int, actual: int) -> None:
    """Refuse to train on another number of processes than was asked for: on the CPU, `accelerate launch --cpu
    --num_processes 2` starts one without a word.

    Raises:
        ConfigError
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != actual:
        raise ConfigError(
            f"the launcher started {launched} processes but only {actual} found each other: on CPU use torchrun, or "
            "accelerate launch --multi_gpu with ACCELERATE_USE_CPU=true"
        )
    if expected and expected != actual:
        raise ConfigError(
            f"training.processes asks for {expected} processes, but {actual} takes part; `accelerate launch --cpu "
            "--num_processes N` starts one only: use torchrun --nproc-per-node N -m moe_opt.distill"
        )


def run_stage(
    config: DistillConfig, stage: StageSettings, name: str, students: Students, objective: Objective, data: Any
) -> list[dict[str, float]]:
    """Train the students on one stage, from its last checkpoint if there is one. Returns the log history."""
    folder = str(config.work_folder / name)
    args = training_arguments(config, stage, folder)
    tokens = config.data.length * config.training.batch_size * config.training.gradient_accumulation * args.world_size
    trainer = DistillTrainer(
        students,
        objective,
        muon=config.training.optimizer == "muon",
        args=args,
        train_dataset=data,
        callbacks=[ProgressLines(name, tokens)],
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":  # prints the raw log dictionary beside our line
            trainer.remove_callback(callback)
    check_processes(config.training.processes, trainer.accelerator.num_processes)
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    trainer.train(resume_from_checkpoint=last)
    return [entry for entry in trainer.state.log_history if "loss" in entry]
