"""United experts (BrownoutServe IV-B): one expert that stands in for a group of experts, as artefact and as module.

The artefact is `united_experts.safetensors` beside `united_experts_config.json`, in a folder of its own, in `ways-K/`
folders side by side, or in a model's folder. Inside a model each experts module gets a child `united` that holds
`[U, ...]` tensors named like the experts' own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from moe_opt.errors import ConfigError, IncompatibleUnitedExpertsError
from moe_opt.modeling.experts import expert_tensor_names, find_moe_layers
from moe_opt.modeling.united_weights import united_weights

if TYPE_CHECKING:
    from moe_opt.modeling.expert_source import ExpertSource
    from moe_opt.modeling.runtime import MoERuntime

WEIGHTS_NAME = "united_experts.safetensors"
CONFIG_NAME = "united_experts_config.json"
FORMAT_VERSION = 1
_FINGERPRINT_SAMPLES = 64
_SAME_MODEL_COSINE = 0.7  # another training run gives about 0; a fine-tune of the same weights stays above 0.9


@dataclasses.dataclass
class UnitedExpertsConfig:
    """What a united-experts checkpoint is made for. Written as `united_experts_config.json`."""

    ways: int
    num_layers: int
    num_experts: int
    hidden_size: int
    groups: list[list[int]]  # [L][E]: united expert of each original expert
    base_model: str | None = None
    base_revision: str | None = None
    model_type: str | None = None
    fingerprint: list[list[float]] | None = None  # [L][64]: samples of the originals it was made from
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> UnitedExpertsConfig:
        try:
            data = json.loads(text)
            known = {field.name for field in dataclasses.fields(cls)}
            config = cls(**{key: value for key, value in data.items() if key in known})
            if config.format_version > FORMAT_VERSION:
                raise IncompatibleUnitedExpertsError(
                    f"{where} has format version {config.format_version}, this moe_opt reads up to "
                    f"{FORMAT_VERSION}: upgrade moe_opt"
                )
            config.check(where)
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise IncompatibleUnitedExpertsError(f"{where} is not a united-experts config: {error}") from error
        return config

    def check(self, where: str) -> None:
        """Every number must be one that a forward pass can index with."""
        for name in ("ways", "num_layers", "num_experts", "hidden_size"):
            if type(getattr(self, name)) is not int:
                raise IncompatibleUnitedExpertsError(f"{where}: {name} must be an integer, got {getattr(self, name)!r}")
        if self.ways < 1 or len(self.groups) != self.num_layers:
            raise IncompatibleUnitedExpertsError(
                f"{where}: ways {self.ways} and groups for {len(self.groups)} layers do not fit "
                f"{self.num_layers} layers"
            )
        for layer, groups in enumerate(self.groups):
            if len(groups) != self.num_experts or set(groups) != set(range(max(groups, default=-1) + 1)):
                raise IncompatibleUnitedExpertsError(
                    f"{where}: the groups of layer {layer} must give each of {self.num_experts} experts a united "
                    "expert counted from 0 without gaps"
                )


def groups_by_index(num_experts: int, ways: int) -> list[int]:
    """The paper's grouping: expert e belongs to group e // ways; ceil(num_experts / ways) groups."""
    return [expert // ways for expert in range(num_experts)]


class UnitedExperts:
    """United experts of one `ways` for all MoE layers of one base model, outside any model.

    Attributes:
        config: `UnitedExpertsConfig`. tensors: per layer, name -> tensor [U, ...] named like the experts' own.
    """

    def __init__(self, config: UnitedExpertsConfig, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.config = config
        self.tensors = [dict(layer) for layer in tensors]

    @property
    def ways(self) -> int:
        return self.config.ways

    def group_of_expert(self, layer: int) -> torch.Tensor:
        """int64 [E]: the united expert that stands in for each original of a layer."""
        return torch.tensor(self.config.groups[layer], dtype=torch.int64)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for layer in self.tensors for tensor in layer.values())

    @classmethod
    def from_average(
        cls,
        model: nn.Module,
        ways: int,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        weights: torch.Tensor | None = None,
    ) -> UnitedExperts:
        """The untrained baseline: each united expert is the (weighted) mean of its group's parameters.

        Args:
            model: any model with MoE layers. ways: experts in a group; ways that do not divide give a smaller last
                group. groups: [L][E] instead of grouping by index. weights: float [L, E], relative weight of each
                expert in its mean, for instance its token count.
        """
        layers = find_moe_layers(model)
        num_experts = int(layers[0][1].num_experts)
        _check_ways(ways, num_experts)
        chosen = (
            [list(map(int, layer)) for layer in groups]
            if groups is not None
            else [groups_by_index(num_experts, ways)] * len(layers)
        )
        tensors = []
        with torch.no_grad():
            for index, (name, module) in enumerate(layers):
                parameters = _plain_parameters(module, name)
                group = torch.tensor(chosen[index])
                mean = torch.zeros(int(group.max()) + 1, num_experts, dtype=torch.float32)
                share = torch.ones(num_experts) if weights is None else weights[index].float().cpu() + 1e-6
                mean[group, torch.arange(num_experts)] = share
                mean /= mean.sum(1, keepdim=True)
                tensors.append(
                    {
                        key: torch.einsum("ue,e...->u...", mean.to(value.device), value.float())
                        .to(value.dtype)
                        .contiguous()
                        for key, value in parameters.items()
                    }
                )
        config = describe_model(model, ways, chosen)
        config.recipe = {"initialisation": "average" if weights is None else "weighted average"}
        config.check("UnitedExperts.from_average")
        return cls(config, tensors)

    @classmethod
    def from_model(cls, model: nn.Module) -> UnitedExperts:
        """The united experts attached to a model, as they are now (tensors are shared, not copied)."""
        runtime = _runtime_of(model)
        if runtime.united_config is None:
            raise ConfigError("this model has no united experts attached")
        tensors = [{key: value.detach() for key, value in _attached(module).items()} for _, module in runtime.layers]
        return cls(runtime.united_config, tensors)

    # ---------------------------------------------------------------- files

    def save_pretrained(self, directory: str | os.PathLike[str], *, card: bool = True) -> None:
        """Write the safetensors, the config and, with `card`, a README.md that says how to use them."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        flat = {
            f"layers.{index}.{key}": value.detach().to("cpu").contiguous().clone()
            for index, layer in enumerate(self.tensors)
            for key, value in layer.items()
        }
        save_file(flat, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        (folder / CONFIG_NAME).write_text(self.config.to_json() + "\n", encoding="utf-8")
        if card:
            from moe_opt.modeling.united_card import model_card

            (folder / "README.md").write_text(model_card(self), encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        ways: int | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        prefer_own: bool = False,
    ) -> UnitedExperts:
        """Read united experts from a folder or a Hub id.

        Args:
            ways: which one, where the source holds several; None takes the only one.
            subfolder: where in the source. prefer_own: the source is a model's folder, and its own united experts go
                before others of the same ways in `ways-K/`.

        Raises:
            IncompatibleUnitedExpertsError: nothing there, damaged files, or several `ways` and none named.
        """
        folder = _resolve_folder(source, revision, token, cache_dir, local_files_only) / subfolder
        folder = _pick_ways(folder, str(source), ways, prefer_own)
        config_path = folder / CONFIG_NAME
        config = UnitedExpertsConfig.from_json(config_path.read_text(encoding="utf-8"), str(config_path))
        if ways is not None and config.ways != ways:
            raise IncompatibleUnitedExpertsError(f"{source} holds united experts of {config.ways} ways, not of {ways}")
        weights_path = folder / WEIGHTS_NAME
        if not weights_path.is_file():
            raise IncompatibleUnitedExpertsError(f"{weights_path} is missing beside its config")
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(config.num_layers)]
        try:
            with safe_open(weights_path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", key)
                    if match is None or int(match[1]) >= config.num_layers:
                        raise IncompatibleUnitedExpertsError(f"{weights_path}: unexpected tensor {key!r}")
                    tensors[int(match[1])][match[2]] = file.get_tensor(key)
        except SafetensorError as error:
            raise IncompatibleUnitedExpertsError(f"{weights_path} is damaged: {error}") from error
        return cls(config, tensors)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        subfolder: bool = False,
    ) -> str:
        """Upload to a Hub repository (created if need be). With `subfolder`, into `ways-K/`, so that one repository
        holds several ways. Returns the address of the commit."""
        import tempfile

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / f"ways-{self.ways}" if subfolder else Path(folder)
            self.save_pretrained(target)
            if subfolder:
                (target / "README.md").rename(Path(folder) / "README.md")
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or f"Upload {self.ways}-way united experts",
            )
        return str(commit.commit_url)


def describe_model(model: nn.Module, ways: int, groups: Sequence[Sequence[int]]) -> UnitedExpertsConfig:
    """A config for united experts of `model`: its shape, its name and samples of its weights."""
    layers = find_moe_layers(model)
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    return UnitedExpertsConfig(
        ways=ways,
        num_layers=len(layers),
        num_experts=int(layers[0][1].num_experts),
        hidden_size=int(getattr(text_config, "hidden_size", 0)),
        groups=[list(map(int, layer)) for layer in groups],
        base_model=_public_name(getattr(config, "name_or_path", None)),
        base_revision=getattr(config, "_commit_hash", None),
        model_type=getattr(text_config, "model_type", None),
        fingerprint=weight_fingerprint(layers),
    )


def attach_united_experts(model: nn.Module, united: UnitedExperts, *, check_base: bool = True) -> None:
    """Give every MoE layer of `model` its united experts; replaces those attached before. Weights already in the model
    are not touched, and nothing changes before all checks have passed.

    Args:
        check_base: compare samples of the base model's weights with those that the united experts were made from.

    Raises:
        IncompatibleUnitedExpertsError: another number of layers or experts, other shapes, another base model.
    """
    if not isinstance(united, UnitedExperts):
        raise ConfigError(
            f"attach_united_experts takes UnitedExperts, got {type(united).__name__}: read them with "
            "UnitedExperts.from_pretrained(...)"
        )
    runtime = _runtime_of(model)
    _check_fits(runtime, united, check_base)
    runtime.install_united(united)


def detach_united_experts(model: nn.Module) -> UnitedExperts:
    """Take the united experts off a model, give them back, and set its brownout thresholds to 1."""
    united = UnitedExperts.from_model(model)
    kept = UnitedExperts(united.config, [{k: v.clone() for k, v in t.items()} for t in united.tensors])
    _runtime_of(model).remove_united()
    return kept


# -------------------------------------------------------------------- inside


def _runtime_of(model: nn.Module) -> MoERuntime:
    runtime = getattr(model, "moe_opt", None)
    if runtime is None:
        raise ConfigError(f"{type(model).__name__} was not loaded with moe_opt: use from_pretrained(..., moe_opt=True)")
    return runtime


def _attached(module: nn.Module) -> dict[str, torch.Tensor]:
    united = united_weights(module)
    assert united is not None
    return {key: getattr(united, key) for key in expert_tensor_names(united)}


def _check_ways(ways: int, num_experts: int) -> None:
    if isinstance(ways, bool) or not isinstance(ways, int) or not 1 <= ways <= num_experts:
        raise ConfigError(f"ways must be an integer between 1 and the {num_experts} experts of a layer, got {ways!r}")


def _plain_parameters(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    found = {key: getattr(module, key) for key in expert_tensor_names(module)}
    if any(value.device.type == "meta" for value in found.values()):
        raise ConfigError(
            f"the weights of {name} are not in memory (offloaded or on the meta device): load the model without "
            "offload to merge its experts"
        )
    if any(value.shape[0] != int(module.num_experts) for value in found.values()):
        raise ConfigError(f"{name} holds one rank's experts only: load the model without expert_parallel to merge them")
    return found


def _check_fits(runtime: MoERuntime, united: UnitedExperts, check_base: bool) -> None:
    config = united.config
    here = (runtime.num_layers, runtime.num_experts)
    if (config.num_layers, config.num_experts) != here:
        raise IncompatibleUnitedExpertsError(
            f"united experts for {config.num_layers} MoE layers of {config.num_experts} experts do not fit this model "
            f"({here[0]} layers of {here[1]}); they were made from {config.base_model or 'an unnamed model'}"
        )
    for index, (name, module) in enumerate(runtime.layers):
        given = united.tensors[index]
        wanted = expert_tensor_names(module)
        if set(given) != set(wanted):
            raise IncompatibleUnitedExpertsError(
                f"united experts of layer {index} hold {sorted(given)}, but {name} needs {sorted(wanted)}"
            )
        united_count = max(config.groups[index]) + 1
        for key in wanted:
            shape = (united_count, *tuple(getattr(module, key).shape[1:]))
            if tuple(given[key].shape) != shape:
                raise IncompatibleUnitedExpertsError(
                    f"united experts of layer {index}: {key} has shape {tuple(given[key].shape)}, {name} needs {shape}"
                )
    if check_base and config.fingerprint is not None:
        mine = runtime.base_fingerprint or weight_fingerprint(runtime.layers)
        if mine is not None and not _same_model(mine, config.fingerprint):
            raise IncompatibleUnitedExpertsError(
                f"united experts made from {config.base_model or 'an unnamed model'} have the right shape, but this "
                "model's expert weights are others: they belong to another model (check_base=False attaches them "
                "anyway)"
            )


def weight_fingerprint(
    layers: Sequence[tuple[str, nn.Module]], source: ExpertSource | None = None
) -> list[list[float]] | None:
    """Per layer, 64 values spread over `down_proj`; None where the weights are not in memory.

    Args: source: where they are read from, if they are not in the modules.
    """
    out = []
    for index, (_, module) in enumerate(layers):
        weight = module.down_proj.detach()
        if not weight.is_floating_point():
            return None
        step = max(1, weight.numel() // _FINGERPRINT_SAMPLES)
        if source is not None:
            places = list(range(0, weight.numel(), step))[:_FINGERPRINT_SAMPLES]
            values = source.elements(index, "down_proj", places).to(weight.dtype)
        elif weight.device.type == "meta":
            return None
        else:
            values = weight.reshape(-1)[::step][:_FINGERPRINT_SAMPLES]
        # Rounding leaves the comparison as it is and keeps the JSON readable.
        out.append([float(f"{v:.5g}") for v in values.float().tolist()])
    return out


def _same_model(mine: list[list[float]], theirs: list[list[float]]) -> bool:
    if [len(a) for a in mine] != [len(b) for b in theirs]:
        return False
    for here, there in zip(mine, theirs, strict=True):
        a, b = torch.tensor(here, dtype=torch.float64), torch.tensor(there, dtype=torch.float64)
        norm = float(a.norm() * b.norm())
        if norm > 0 and float(a @ b) / norm < _SAME_MODEL_COSINE:
            return False
    return True


def _public_name(name: str | None) -> str | None:
    """A Hub id as it is; of a local path only the last part, so that no machine's folders end up in a checkpoint."""
    if not name:
        return None
    return Path(name).resolve().name if os.path.exists(name) or os.path.isabs(name) else name


def _resolve_folder(
    source: str | os.PathLike[str],
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    name = str(source)
    if folder.exists() or folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise IncompatibleUnitedExpertsError(f"no folder with united experts at {name}")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=[f"*{WEIGHTS_NAME}", f"*{CONFIG_NAME}"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise IncompatibleUnitedExpertsError(
            f"no united experts at {name!r}: neither a folder here nor a Hub repository within reach ({reason})"
        ) from error


def holds_united_experts(folder: Path) -> bool:
    """Whether a folder has united experts, of its own or in `ways-K`."""
    return (folder / CONFIG_NAME).is_file() or any(folder.glob(f"ways-*/{CONFIG_NAME}"))


def _pick_ways(folder: Path, source: str, ways: int | None, prefer_own: bool) -> Path:
    """The folder that holds the config: `folder` itself, or one of its `ways-K`."""
    if ways is not None and (isinstance(ways, bool) or not isinstance(ways, int) or ways < 1):
        raise ConfigError(f"ways must be an integer of at least 1, got {ways!r}")
    sub = {
        int(match[1]): path.parent
        for path in folder.glob(f"ways-*/{CONFIG_NAME}")
        if (match := re.fullmatch(r"ways-(\d+)", path.parent.name))
    }
    here = (folder / CONFIG_NAME).is_file()
    if here and prefer_own:
        return folder
    if ways is not None and ways in sub:
        return sub[ways]
    if here and (ways is not None or not sub):
        return folder
    if here:  # a folder with its own united experts and others in ways-K beside them
        own = UnitedExpertsConfig.from_json((folder / CONFIG_NAME).read_text(encoding="utf-8"), source).ways
        sub.setdefault(own, folder)
    if ways is None and len(sub) == 1:
        return next(iter(sub.values()))
    choices = ", ".join(str(k) for k in sorted(sub))
    if not sub:
        raise IncompatibleUnitedExpertsError(f"{source} holds no {CONFIG_NAME}, nor does a ways-K folder in it")
    if ways is None:
        raise IncompatibleUnitedExpertsError(f"{source} holds united experts of {choices} ways: say which, ways=...")
    raise IncompatibleUnitedExpertsError(f"{source} holds no {ways}-way united experts, only {choices}")
