"""Choice log-likelihoods from one prefill, shared prefixes computed once, no KV cache (MoE-Prefill, sections 3 and 7).

Prompts with their choices form trees of tokens: what sequences have in common stands in a tree once. A tree runs as one
row in which a token sees its ancestors only, at the position of its depth, so that every choice is scored as if it had
been alone. The last token of a choice is never computed: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.modeling.score_item import ScoreItem

_TREE_ATTENTION = ("eager", "sdpa")
_TREE_LAYERS = {"full_attention", "sliding_attention"}
_LOGIT_VALUES = 1 << 24  # logits of a batch: 64 MB in fp32
MIN_SHARED_TOKENS = 8  # below that, a common beginning (a start-of-text token) is no reason to share a row


@dataclass
class Tree:
    """Tokens of some items in depth-first order.

    Attributes:
        tokens, depths: int [S]. ends: int [S], one past the last descendant of each node.
        targets: per (item, choice) the node that predicts its first token and so on, with the tokens themselves.
    """

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: NDArray[np.int64] | None = None
    targets: list[tuple[int, int, list[int], Sequence[int]]] = field(default_factory=list)  # item, choice, nodes, ids
    branches: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def wanted(self) -> set[int]:
        """Nodes whose logits are needed."""
        return {node for _, _, nodes, _ in self.targets for node in nodes}


@dataclass
class ScoreStats:
    """What scoring did. Tokens: `asked` is the sum of all prompts with each of their choices; `computed` were run."""

    items: int = 0
    choices: int = 0
    asked: int = 0
    prompt_tokens: int = 0
    computed: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)  # (new tokens, tokens before them)
    passes: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the asked tokens that another sequence had computed already."""
        return 1.0 - self.computed / self.asked if self.asked else 0.0


def shares_prefixes(model: Any) -> bool:
    """Whether trees can run on this model: attention everywhere, by a kernel that takes a mask."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    return config._attn_implementation in _TREE_ATTENTION and (not layers or set(layers) <= _TREE_LAYERS)


def build_trees(
    items: Sequence[ScoreItem], max_tokens: int, share: bool, stats: ScoreStats | None = None
) -> list[Tree]:
    """Sort the items' sequences and merge common beginnings; a new tree starts where a sequence shares fewer than
    `MIN_SHARED_TOKENS` tokens with the one before, or the tree is full. One choice a tree where `share` is False.

    Raises:
        ConfigError: an item without tokens.
    """
    sequences: list[tuple[list[int], int, int, int]] = []  # ids without the last, item, choice, prompt length
    for number, item in enumerate(items):
        if not item.prompt or not item.choices or not all(len(choice) for choice in item.choices):
            raise ConfigError("scoring needs a prompt and choices of at least one token each")
        prompt = list(item.prompt)
        for index, choice in enumerate(item.choices):
            sequences.append(([*prompt, *choice[:-1]], number, index, len(prompt)))
    sequences.sort(key=lambda s: s[0])
    trees: list[Tree] = []
    path: list[int] = []  # node of each depth of the sequence before
    before: list[int] = []
    for ids, number, index, prompt_length in sequences:
        common = common_prefix(before, ids) if share and trees else 0
        if common < min(MIN_SHARED_TOKENS, len(ids)) or len(trees[-1]) + len(ids) - common > max_tokens:
            trees.append(Tree())
            path, common = [], 0
        tree = trees[-1]
        if common < len(ids):
            tree.branches = tree.branches or common < len(path)
            if stats is not None:
                stats.segments.append((len(ids) - common, common))
        path = path[:common] + list(range(len(tree), len(tree) + len(ids) - common))
        tree.tokens.extend(ids[common:])
        tree.depths.extend(range(common, len(ids)))
        choice_ids = items[number].choices[index]
        tree.targets.append((number, index, path[prompt_length - 1 : prompt_length - 1 + len(choice_ids)], choice_ids))
        before = ids
    if stats is not None:
        stats.items += len(items)
        stats.choices += len(sequences)
        stats.asked += sum(len(ids) for ids, *_ in sequences)
        stats.prompt_tokens += sum(len(item.prompt) for item in items)
        stats.computed += sum(len(tree) for tree in trees)
    return trees


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # bisect: list comparison runs in C
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@torch.no_grad()
def score_items(
    model: Any,
    items: Sequence[ScoreItem],
    *,
    max_batch_tokens: int = 8192,
    share_prefixes: bool = True,
    stats: ScoreStats | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[list[float]]:
    """Sum of the log-probabilities of each choice's tokens after its prompt, in nats.

    Args:
        model: any causal LM of Transformers. items: as token ids; a choice's ids follow the prompt's directly.
        max_batch_tokens: rows x longest row of a forward pass; a single longer tree runs alone.
        share_prefixes: compute common beginnings once. False runs every choice by itself.
        progress: called with the number of choices done.

    Returns: one list per item, one float per choice. The result depends on the items and these settings only.

    Raises:
        ConfigError: an item without tokens, or longer than the model's positions.
    """
    batches = plan_passes(
        model, items, max_batch_tokens=max_batch_tokens, share=share_prefixes and shares_prefixes(model), stats=stats
    )
    out = [[0.0] * len(item.choices) for item in items]
    for batch in batches:
        run_pass(model, batch, out)
        if stats is not None:
            stats.passes += 1
        if progress is not None:
            progress(sum(len(tree.targets) for tree in batch))
    return out


def plan_passes(
    model: Any, items: Sequence[ScoreItem], *, max_batch_tokens: int, share: bool, stats: ScoreStats | None = None
) -> list[list[Tree]]:
    """The trees of each forward pass that scores these items; runs nothing. Arguments and errors: `score_items`."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    for item in items:
        longest = len(item.prompt) + max((len(choice) for choice in item.choices), default=0) - 1
        if limit is not None and longest > limit:
            raise ConfigError(f"a prompt with its choice has {longest} tokens, the model takes {limit}")
    trees = build_trees(items, max_batch_tokens, share, stats)
    return list(_batches(trees, max_batch_tokens, _LOGIT_VALUES // config.vocab_size))


def run_pass(model: Any, batch: list[Tree], out: list[list[float]], exact: bool = False) -> None:
    """One forward pass; its choices' log-probabilities go into `out` (by item and choice). Gradients are off.
    exact: tell moe_opt that these tokens keep their experts (in a pass that other ranks may run browned out)."""
    for tree, values in zip(batch, _run_batch(model, batch, exact), strict=True):
        for (number, index, _, _), value in zip(tree.targets, values, strict=True):
            out[number][index] = value


def _batches(trees: list[Tree], max_tokens: int, max_logits: int) -> Iterable[list[Tree]]:
    """Trees of like length, longest first; chains and branching trees apart, since only these need a mask. The logits
    of a batch are those of all its rows at every position that one of them needs: at most `max_logits` vectors."""
    for branches in (True, False):
        batch: list[Tree] = []
        wanted: set[int] = set()
        chosen = sorted((t for t in trees if t.branches == branches), key=lambda t: -len(t))  # stable
        for tree in chosen:
            more = wanted | tree.wanted
            rows = len(batch) + 1
            if batch and (rows * len(batch[0]) > max_tokens or rows * len(more) > max_logits):
                yield batch
                batch, more = [], tree.wanted
            batch.append(tree)
            wanted = more
        if batch:
            yield batch


def _run_batch(model: Any, batch: list[Tree], exact: bool) -> list[list[float]]:
    longest = len(batch[0])
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    valid = torch.zeros(len(batch), longest, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for row, tree in enumerate(batch):
        ids[row, : len(tree)] = torch.tensor(tree.tokens)
        positions[row, : len(tree)] = torch.tensor(tree.depths)
        valid[row, : len(tree)] = 1
    wanted = sorted(set().union(*(tree.wanted for tree in batch)))
    keep = torch.tensor(wanted)
    device = model.device
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False, "logits_to_keep": keep.to(device)}
    if batch[0].branches:
        inputs["position_ids"] = positions.to(device)
        inputs["attention_mask"] = _tree_masks(model, batch, longest)
        logits = _with_padding(model, valid.to(device), exact, inputs)
    else:
        inputs["attention_mask"] = None if bool(valid.all()) else valid.to(device)
        logits = _with_padding(model, valid.to(device), exact, inputs) if exact else model(**inputs).logits
    column = {node: place for place, node in enumerate(wanted)}
    out = []
    for row, tree in enumerate(batch):
        nodes = [column[node] for _, _, chain, _ in tree.targets for node in chain]
        tokens = [token for *_, choice in tree.targets for token in choice]
        log_probs = logits[row, nodes].float().log_softmax(-1)
        picked = log_probs.gather(1, torch.tensor(tokens, device=log_probs.device).unsqueeze(1))[:, 0]
        lengths = [len(choice) for *_, choice in tree.targets]
        out.append([float(part.sum()) for part in picked.split(lengths)])
    return out


def _with_padding(model: Any, valid: torch.Tensor, exact: bool, inputs: dict[str, Any]) -> torch.Tensor:
    """Run with a mask of our own; tell moe_opt, which cannot read padding off it, which tokens are real, and whether
    they keep their experts."""
    runtime = getattr(model, "moe_opt", None)
    if runtime is None:
        return model(**inputs).logits
    rows = torch.where(valid.bool(), 0, -1).reshape(-1)
    with runtime.batch(rows, phase="prefill", exact=torch.ones_like(rows, dtype=torch.bool) if exact else None):
        return model(**inputs).logits


def _tree_masks(model: Any, batch: list[Tree], longest: int) -> Any:
    """Attention masks [B, 1, S, S] under which a token sees its ancestors and itself; padding sees itself only."""
    config = model.config.get_text_config()
    node = torch.arange(longest)
    seen = torch.empty(len(batch), longest, longest, dtype=torch.bool)
    depths = torch.zeros(len(batch), longest, dtype=torch.int64)
    for row, tree in enumerate(batch):
        ends = torch.ones(longest, dtype=torch.int64) + node
        ends[: len(tree)] = torch.from_numpy(subtree_ends(tree.depths))
        depths[row, : len(tree)] = torch.tensor(tree.depths)
        seen[row] = (node.unsqueeze(1) >= node) & (node.unsqueeze(1) < ends)
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    dtype, device = model.dtype, model.device

    def finish(mask: torch.Tensor) -> torch.Tensor:
        mask = mask.unsqueeze(1).to(device)
        if config._attn_implementation == "sdpa":
            return mask
        return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)

    near = seen
    if window:
        near = seen & (depths.unsqueeze(2) - depths.unsqueeze(1) < window)
    if layers and "sliding_attention" in layers:
        return {"full_attention": finish(seen), "sliding_attention": finish(near)}
    if not layers and window and getattr(config, "use_sliding_window", True):
        return finish(near)
    return finish(seen)


def subtree_ends(depths: Sequence[int]) -> NDArray[np.int64]:
    """int64 [S]: one past the last descendant of each node of a depth-first listing."""
    ends = np.full(len(depths), len(depths), dtype=np.int64)
    open_nodes: list[int] = []  # one per depth
    for node, depth in enumerate(depths):
        if depth < len(open_nodes):
            ends[open_nodes[depth:]] = node
            del open_nodes[depth:]
        open_nodes.append(node)
    return ends
