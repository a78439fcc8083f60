"""From a recipe to united experts in `OUTPUT/ways-K/`: calibrate, group, initialise, train, measure, save."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from moe_opt.distill.calibration import (
    LayerSample,
    LayerStatistics,
    co_activation,
    collect_samples,
    output_similarity,
    statistics,
)
from moe_opt.distill.config import DistillConfig, StageSettings
from moe_opt.distill.data import first_sequences, load_tokenizer, training_data
from moe_opt.distill.grouping import group_experts
from moe_opt.distill.history import with_history
from moe_opt.distill.initialise import initial_weights
from moe_opt.distill.measure import error_per_expert, measure_united, next_token_figures
from moe_opt.distill.objectives import LayerObjective, LogitObjective, Objective, ThresholdSampler
from moe_opt.distill.students import Students, add_lora
from moe_opt.distill.trainer import check_processes, run_stage
from moe_opt.errors import ConfigError
from moe_opt.modeling.auto import MoEOptimizedForCausalLM
from moe_opt.modeling.united import UnitedExperts, attach_united_experts, describe_model

_STAGE_SEED = {"layers": 1, "logits": 2}
_RECIPE_FILE = "recipe.json"


def distill(config: DistillConfig) -> dict[int, UnitedExperts]:
    """Run a recipe. Started again after a kill, it goes on from the last checkpoint in the work folder.

    Returns: way -> united experts, also written to `OUTPUT/ways-K/` with recipe, figures and model card.

    Raises:
        ConfigError: what the recipe asks for cannot be had (model, data, processes, a work folder of another recipe).
    """
    state = PartialState(cpu=config.training.use_cpu or not torch.cuda.is_available())
    check_processes(config.training.processes, state.num_processes)
    started = time.monotonic()
    work = config.work_folder
    if state.is_main_process:
        _claim(work, config)
    state.wait_for_everyone()
    tokenizer = load_tokenizer(config.model.name, config.model.revision)
    model = load_teacher(config, state.device)
    too_many = [way for way in config.ways if way > model.moe_opt.num_experts]
    if too_many:
        raise ConfigError(f"recipe: ways {too_many[0]} is more than the {model.moe_opt.num_experts} experts of a layer")
    samples = calibrate(config, model, tokenizer)
    stats = [statistics(module, sample) for (_, module), sample in zip(model.moe_opt.layers, samples, strict=True)]

    initial = work / "initial"
    if state.is_main_process and not _complete(initial, config.ways):
        if config.start:
            _save_all(_started(config, model), initial)
        else:
            _say(f"grouping by {config.grouping}, initialisation {config.initialisation}")
            _save_all(initialise(config, model, samples, stats), initial)
    state.wait_for_everyone()
    united = _load_all(initial, config.ways)
    earlier = {way: result.config.recipe for way, result in united.items()} if config.start else {}
    history: dict[str, list[dict[str, float]]] = {}
    for name, stage in (("layers", config.layers), ("logits", config.logits)):
        if stage.steps == 0:
            continue
        done = work / name / "final"
        if not _complete(done, config.ways):
            trained, history[name] = train_stage(config, name, stage, model, tokenizer, united, stats)
            if state.is_main_process:
                _save_all(trained, done)
                (done / "history.json").write_text(json.dumps(history[name]))
            state.wait_for_everyone()
        history[name] = json.loads((done / "history.json").read_text())
        united = _load_all(done, config.ways)
    if state.is_main_process:
        finish(config, model, tokenizer, united, samples, history, earlier, time.monotonic() - started)
    state.wait_for_everyone()
    return united


def _started(config: DistillConfig, model: Any) -> dict[int, UnitedExperts]:
    """The united experts that `start` names, if they belong to this model."""
    assert config.start is not None
    found = {way: UnitedExperts.from_pretrained(config.start, ways=way) for way in config.ways}
    for united in found.values():
        attach_united_experts(model, united)  # does the checking
    model.moe_opt.remove_united()
    return found


def load_teacher(config: DistillConfig, device: torch.device) -> Any:
    """The exact model, frozen."""
    settings = config.model
    try:
        model = MoEOptimizedForCausalLM.from_pretrained(
            settings.name,
            moe_opt={"united_experts": None},
            revision=settings.revision,
            dtype=getattr(torch, settings.dtype),
            **settings.load,
        )
    except OSError as error:
        raise ConfigError(f"cannot load model {settings.name!r}: {str(error).strip().splitlines()[0]}") from error
    model.requires_grad_(False).eval()
    return model if "device_map" in settings.load else model.to(device)


def calibrate(config: DistillConfig, model: Any, tokenizer: Any) -> list[LayerSample]:
    """Inputs of every MoE layer on the first training sequences."""
    count = max(1, config.calibration_tokens // config.data.length)
    sequences = first_sequences(config.data, tokenizer, count, config.training.seed, held_out=False)
    if sequences is None:
        raise ConfigError(f"data {config.data.path!r} holds less than one sequence of {config.data.length} tokens")
    return collect_samples(model, sequences, config.training.plan_size)


def initialise(
    config: DistillConfig, model: Any, samples: list[LayerSample], stats: list[LayerStatistics]
) -> dict[int, UnitedExperts]:
    """Groups and first weights of all ways."""
    runtime = model.moe_opt
    groups: dict[int, list[list[int]]] = {way: [] for way in config.ways}
    tensors: dict[int, list[dict[str, torch.Tensor]]] = {way: [] for way in config.ways}
    for (_, module), sample, stat in zip(runtime.layers, samples, stats, strict=True):
        similarity = None
        if config.grouping == "output":
            similarity = output_similarity(module, sample)
        elif config.grouping == "co-activation":
            similarity = co_activation(sample, runtime.num_experts)
        for way in config.ways:
            groups[way].append(group_experts(similarity, runtime.num_experts, way))
            weights = initial_weights(module, sample, stat, groups[way][-1], config.initialisation, config.ridge)
            tensors[way].append({name: value.cpu() for name, value in weights.items()})
    return {way: UnitedExperts(describe_model(model, way, groups[way]), tensors[way]) for way in config.ways}


def train_stage(
    config: DistillConfig,
    name: str,
    stage: StageSettings,
    model: Any,
    tokenizer: Any,
    united: dict[int, UnitedExperts],
    stats: list[LayerStatistics],
) -> tuple[dict[int, UnitedExperts], list[dict[str, float]]]:
    """One stage of gradient training from `united` on."""
    students = Students(united)
    if name == "logits" and stage.lora_rank:
        add_lora(students, stage.lora_rank, stage.lora_alpha)
    training = config.training
    seed = training.seed + _STAGE_SEED[name]
    sampler = ThresholdSampler(stage, seed)
    total = stage.steps * training.batch_size * training.gradient_accumulation * PartialState().num_processes
    data = training_data(config.data, tokenizer, total, seed)
    if name == "layers":
        scales = [s.expert_scale if stage.objective == "paper" else s.output_scale for s in stats]
        objective: Objective = LayerObjective(model, stage, scales, training.plan_size, sampler)
        history = run_stage(config, stage, name, students, objective, data)
    else:
        logits = LogitObjective(model, students, stage, training.plan_size, sampler)
        try:
            history = run_stage(config, stage, name, students, logits, data)
        finally:
            logits.close()
    return {way: students.to_united(way) for way in students.ways}, history


def finish(
    config: DistillConfig,
    model: Any,
    tokenizer: Any,
    united: dict[int, UnitedExperts],
    samples: list[LayerSample],
    history: dict[str, list[dict[str, float]]],
    earlier: dict[int, dict[str, Any]],
    seconds: float,
) -> None:
    """Measure, and write `OUTPUT/ways-K/`."""
    settings = config.measure
    held_out = None
    if config.data.held_out and settings.sequences:
        # Seed 0 whatever the run's: recipes are compared on the same text.
        held_out = first_sequences(config.data, tokenizer, settings.sequences, 0, held_out=True)
    exact = None
    if held_out is not None:
        _say(f"measuring on {len(held_out)} held-out sequences")
        exact = next_token_figures(model, held_out, settings.batch_size)
    for way, result in united.items():
        result = _converted(result, getattr(torch, config.save_dtype))
        united[way] = result
        metrics: dict[str, Any] = {"training_minutes_all_ways": round(seconds / 60, 1)}
        for stage, log in history.items():
            if log:
                metrics[f"loss_{stage}"] = _first_and_last([entry[f"loss_ways_{way}"] for entry in log])
        if held_out is not None and exact is not None:
            metrics["held_out_sequences"] = len(held_out)
            metrics["sequence_length"] = config.data.length
            metrics["batch_size"] = settings.batch_size
            metrics["exact"] = _rounded(exact)
            rows = measure_united(model, result, held_out, settings.batch_size, settings.thresholds, exact)
            metrics["brownout"] = [_rounded(row) for row in rows]
            for row in rows:
                _say(
                    f"{way} ways, threshold {row['threshold']:g}: accuracy {row['accuracy']:.4f} "
                    f"({100 * row['relative_loss']:.2f} % lost), {row['experts_read']:.1f} experts read a layer"
                )
        metrics["error_per_expert"] = error_per_expert(model, result, samples)
        result.config.metrics = metrics
        result.config.recipe = with_history(_public_recipe(config), earlier.get(way))
        result.save_pretrained(Path(config.output) / f"ways-{way}")
    if config.work is None:
        shutil.rmtree(config.work_folder, ignore_errors=True)
    _say(f"wrote {', '.join(f'ways-{way}' for way in united)} to {config.output}")


def _public_recipe(config: DistillConfig) -> dict[str, Any]:
    """The recipe without what only this machine knows: folders shrink to their last part."""
    recipe = config.to_dict()
    del recipe["output"], recipe["work"]
    name = Path(config.model.name)
    recipe["model"]["name"] = name.name if name.exists() else config.model.name
    if config.data.data_files:
        recipe["data"]["data_files"] = [
            pattern if "://" in pattern else Path(pattern).name for pattern in config.data.data_files
        ]
    if Path(config.data.path).exists():
        recipe["data"]["path"] = Path(config.data.path).name
    return recipe


def _first_and_last(losses: list[float]) -> list[float]:
    """Means of the first and last tenth of what was logged: single steps differ by the difficulty of their text."""
    tenth = max(1, len(losses) // 10)
    return [round(sum(part) / tenth, 6) for part in (losses[:tenth], losses[-tenth:])]


def _converted(united: UnitedExperts, dtype: torch.dtype) -> UnitedExperts:
    return UnitedExperts(united.config, [{k: v.to(dtype) for k, v in layer.items()} for layer in united.tensors])


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.5g}") for key, value in row.items()}


def _claim(work: Path, config: DistillConfig) -> None:
    """Make the work folder this recipe's; refuse one that holds checkpoints of another."""
    mine = config.to_dict()
    for key in ("output", "work", "measure", "save_dtype"):
        del mine[key]
    mine["training"].pop("processes")
    mine = json.loads(json.dumps(mine))
    file = work / _RECIPE_FILE
    used = work.is_dir() and any(path.name != _RECIPE_FILE for path in work.iterdir())  # else it failed before it began
    if used and file.is_file() and json.loads(file.read_text()) != mine:
        raise ConfigError(
            f"{work} holds checkpoints of another recipe: delete it, or name another folder (work: in the recipe)"
        )
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine, indent=1))


def _complete(folder: Path, ways: list[int]) -> bool:
    return (folder / "complete").is_file() and all((folder / f"ways-{way}").is_dir() for way in ways)


def _save_all(united: dict[int, UnitedExperts], folder: Path) -> None:
    for way, result in united.items():
        result.save_pretrained(folder / f"ways-{way}", card=False)
    (folder / "complete").write_text("")  # a kill in between leaves a folder that is made again


def _load_all(folder: Path, ways: list[int]) -> dict[int, UnitedExperts]:
    return {way: UnitedExperts.from_pretrained(folder, ways=way) for way in ways}


def _say(text: str) -> None:
    print(f"[distill] {text}", flush=True)
