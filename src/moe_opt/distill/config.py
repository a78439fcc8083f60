"""A recipe: which model, which text, which united experts, and how they are trained. YAML, checked key by key."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError

GROUPINGS = ("index", "output", "co-activation")
INITIALISATIONS = ("average", "frequency", "aligned", "selection")
OPTIMIZERS = ("adamw", "muon")
OBJECTIVES = ("gate-weighted", "paper")
DTYPES = ("float32", "bfloat16", "float16")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclasses.dataclass
class ModelSettings:
    """The teacher. `load` goes to `from_pretrained` as it is (`attn_implementation`, `device_map`, ...)."""

    name: str = ""
    revision: str | None = None
    dtype: str = "bfloat16"
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    licence: str | None = None  # Hub id of the licence that the united experts inherit, for the model card


@dataclasses.dataclass
class DataSettings:
    """What `datasets.load_dataset` reads. `path` is a Hub name or a loader ("json", "parquet", "text", ...).

    Attributes:
        data_files: file names or globs for a loader; `${NAME:-default}` takes an environment variable.
        text: the column with the text, or "messages" style columns for which the tokenizer has a chat template.
        length: tokens in a packed sequence. Documents follow each other with the end-of-text token between them.
        held_out: texts with crc32(text) % held_out == 0 are left out of training and measured on afterwards; 0 = none.
        shuffle_buffer: for streaming, how many texts are shuffled at a time.
    """

    path: str = "json"
    name: str | None = None
    revision: str | None = None
    data_files: list[str] | None = None
    split: str = "train"
    text: str = "text"
    streaming: bool = False
    shuffle_buffer: int = 10_000
    length: int = 512
    held_out: int = 20


@dataclasses.dataclass
class StageSettings:
    """One stage of gradient training; `steps` 0 leaves it out.

    Attributes:
        threshold: the brownout threshold of each planned batch is drawn from U(low, high).
        zero_share: share of planned batches whose threshold is 0 instead.
        objective: stage 1 only: "gate-weighted" (error of what the layer puts out) or "paper" (Eq. 4).
        label_weight: stage 2 only: weight of the next-token cross-entropy beside the divergence from the teacher.
        lora_rank: stage 2 only: train LoRA matrices of this rank on the united weights; 0 trains the weights.
    """

    steps: int = 0
    learning_rate: float = 1e-3
    threshold: list[float] = dataclasses.field(default_factory=lambda: [0.0, 1.0])
    zero_share: float = 0.25
    objective: str = "gate-weighted"
    label_weight: float = 0.0
    lora_rank: int = 0
    lora_alpha: float | None = None
    gradient_checkpointing: bool = False


@dataclasses.dataclass
class TrainingSettings:
    """What both stages share. `options` goes to `transformers.TrainingArguments` as it is.

    Attributes:
        batch_size: sequences of a forward pass on one device. plan_size: sequences that one brownout plan covers, as a
            server's step would; it divides batch_size, so that neither the number of processes nor gradient
            accumulation changes what is computed.
        optimizer: "adamw", or "muon" for the united experts' matrices (biases and LoRA matrices stay with AdamW).
        processes: processes that must take part; 0 accepts any number.
    """

    batch_size: int = 8
    plan_size: int = 4
    gradient_accumulation: int = 1
    warmup: float = 0.05
    schedule: str = "cosine"
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    save_steps: int = 50
    logging_steps: int = 10
    seed: int = 0
    processes: int = 0
    use_cpu: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class MeasureSettings:
    """The held-out figures that go into the checkpoint: ways x thresholds on batches of `batch_size` sequences."""

    sequences: int = 64
    batch_size: int = 8
    thresholds: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.2, 0.4])
    dtype: str | None = None  # None: the model's


@dataclasses.dataclass
class DistillConfig:
    """A whole recipe; `from_yaml` reads one. See docs/distill.md for every key."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    ways: list[int] = dataclasses.field(default_factory=lambda: [2, 4, 8])
    grouping: str = "co-activation"
    initialisation: str = "selection"
    ridge: float | None = 1e-3  # weight of the closed-form down projection's penalty; None leaves the projection
    calibration_tokens: int = 16_384
    start: str | None = None  # train on from these united experts (folder or Hub id) instead of grouping anew
    layers: StageSettings = dataclasses.field(default_factory=lambda: StageSettings(steps=0, learning_rate=1e-3))
    logits: StageSettings = dataclasses.field(default_factory=lambda: StageSettings(steps=400, learning_rate=5e-4))
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    measure: MeasureSettings = dataclasses.field(default_factory=MeasureSettings)
    output: str = ""
    work: str | None = None  # checkpoints while training; None: OUTPUT/.work, removed when all is done
    save_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: dict[str, Any] | None = None) -> DistillConfig:
        """Read a recipe. `overrides`: dotted keys, for instance {"logits.steps": 10}.

        Raises:
            ConfigError: no such file, not YAML, an unknown key, or a value of the wrong kind or out of range.
        """
        import yaml

        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"no recipe at {file}; the repository has some in recipes/")
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not YAML: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{file} must hold keys and values, for instance `ways: [2, 4, 8]`")
        for key, value in (overrides or {}).items():
            *parents, last = key.split(".")
            place = data
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise ConfigError(f"{key}: {parent} is a single value in {file}")
            place[last] = value
        return _build(cls, _expand(data), str(file))

    def check(self) -> None:
        """Refuse what cannot work before a model is loaded."""
        if not self.model.name:
            raise ConfigError("recipe: model.name is missing (a folder or Hub id)")
        if not self.output:
            raise ConfigError("recipe: output is missing (the folder that ways-K/ go to)")
        if not self.ways or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in self.ways):
            raise ConfigError(f"recipe: ways must list integers of at least 1, got {self.ways!r}")
        self.ways = sorted(set(self.ways))
        _choose("grouping", self.grouping, GROUPINGS)
        _choose("initialisation", self.initialisation, INITIALISATIONS)
        _choose("model.dtype", self.model.dtype, DTYPES)
        _choose("save_dtype", self.save_dtype, DTYPES)
        for name, stage in (("layers", self.layers), ("logits", self.logits)):
            _choose(f"{name}.objective", stage.objective, OBJECTIVES)
            low_high = stage.threshold
            if len(low_high) != 2 or not 0.0 <= low_high[0] <= low_high[1] <= 1.0:
                raise ConfigError(f"recipe: {name}.threshold must be [low, high] within [0, 1], got {low_high}")
            if not 0.0 <= stage.zero_share <= 1.0:
                raise ConfigError(f"recipe: {name}.zero_share must lie in [0, 1], got {stage.zero_share}")
            if stage.steps < 0 or not 0 < stage.learning_rate < math.inf or stage.lora_rank < 0:
                raise ConfigError(f"recipe: {name} needs steps >= 0, a finite learning_rate > 0 and lora_rank >= 0")
            if not 0 <= stage.label_weight < math.inf:
                raise ConfigError(f"recipe: {name}.label_weight must be finite, at least 0, not {stage.label_weight}")
        for key in ("label_weight", "lora_rank", "gradient_checkpointing"):
            if getattr(self.layers, key):
                raise ConfigError(f"recipe: layers.{key} has no effect: set logits.{key}, of the second stage")
        training = self.training
        _choose("training.optimizer", training.optimizer, OPTIMIZERS)
        for name in ("batch_size", "plan_size", "gradient_accumulation", "save_steps", "logging_steps"):
            if getattr(training, name) < 1:
                raise ConfigError(f"recipe: training.{name} must be at least 1, got {getattr(training, name)}")
        if training.batch_size % training.plan_size:
            raise ConfigError(
                f"recipe: training.plan_size {training.plan_size} must divide training.batch_size {training.batch_size}"
            )
        if self.data.length < 2 or self.calibration_tokens < self.data.length:
            raise ConfigError("recipe: data.length must be at least 2, and calibration_tokens at least data.length")
        if self.data.held_out < 0 or self.data.held_out == 1:
            raise ConfigError("recipe: data.held_out must be 0 (no text held out) or at least 2")
        if any(not 0.0 <= t < 1.0 for t in self.measure.thresholds):
            raise ConfigError(f"recipe: measure.thresholds must lie in [0, 1), got {self.measure.thresholds}")

    @property
    def work_folder(self) -> Path:
        return Path(self.work) if self.work else Path(self.output) / ".work"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"recipe: unknown {name} {value!r}; choose one of {', '.join(choices)}")


def _expand(value: Any) -> Any:
    """`${NAME}` and `${NAME:-default}` in every string."""
    if isinstance(value, dict):
        return {key: _expand(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand(inner) for inner in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise ConfigError(f"recipe: environment variable {match[1]} is not set")
        return found

    return _VARIABLE.sub(replace, value)


def _build(cls: type, data: Any, where: str) -> Any:
    """A settings object from a mapping; every key must exist and every value must be of its kind."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys and values, got {data!r}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(sorted(hints))}")
    values = {}
    for key, value in data.items():
        hint = hints[key]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            base = _defaults_of(cls, key)
            values[key] = _build(
                hint, {**base, **(value if isinstance(value, dict) else {"": value})}, f"{where}: {key}"
            )
        else:
            values[key] = _convert(value, hint, f"{where}: {key}")
    return cls(**values)


def _defaults_of(cls: type, key: str) -> dict[str, Any]:
    """The default settings of a nested section, which differ between `layers` and `logits`."""
    factory = next(field.default_factory for field in dataclasses.fields(cls) if field.name == key)
    assert factory is not dataclasses.MISSING
    return dataclasses.asdict(factory())


def _convert(value: Any, hint: Any, where: str) -> Any:
    options = (
        typing.get_args(hint) if not isinstance(hint, type) and typing.get_origin(hint) not in (list, dict) else ()
    )
    if options and type(None) in options:
        if value is None:
            return None
        hint = next(option for option in options if option is not type(None))
    origin = typing.get_origin(hint)
    if origin is dict:
        if isinstance(value, dict):
            return value
        raise ConfigError(f"{where} must be a mapping, got {value!r}")
    if origin is list:
        (inner,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        return [_convert(item, inner, where) for item in items]
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 as a string
        try:
            value = float(value)
        except ValueError as error:
            raise ConfigError(f"{where} must be a number, got {value!r}") from error
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {hint.__name__}, got {value!r}")
    return value
