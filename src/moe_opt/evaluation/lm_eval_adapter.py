"""EleutherAI's lm-eval on a browned-out model: importing this module registers the model type `moe_opt`.

    python -m moe_opt.evaluation.lm_eval_adapter run --model moe_opt --tasks piqa --batch_size 16 \\
        --model_args pretrained=PATH,united_experts=PATH,ways=4,threshold=0.2

lm-eval's own Hugging Face backend pads log-likelihood batches without an attention mask. Brownout counts tokens per
expert, and would count that padding, so log-likelihoods go through `continuation_log_probs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from moe_opt.config import MoEOptConfig
from moe_opt.errors import ConfigError
from moe_opt.evaluation.choices import continuation_log_probs
from moe_opt.modeling.auto import MoEOptimizedForCausalLM

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ConfigError(f"the lm-eval adapter needs lm-eval: pip install 'lm-eval[hf]' ({error})") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEFAULT_BATCH = 16


@register_model("moe_opt")
class MoEOptLM(HFLM):  # type: ignore[misc]
    """lm-eval's Hugging Face backend on a model that `moe_opt` loads.

    Args:
        pretrained: folder, Hub id, or a model that was loaded with `moe_opt`.
        united_experts, ways: as in `MoEOptConfig`. threshold, strategy, keep, phase: as in
            `model.moe_opt.set_brownout`; the default is exact output.
        **kwargs: whatever lm-eval's `hf` model takes (device, dtype, batch_size, max_length, ...).
    """

    AUTO_MODEL_CLASS = MoEOptimizedForCausalLM

    def __init__(
        self,
        pretrained: Any,
        *,
        united_experts: str | None = None,
        ways: int | None = None,
        threshold: float = 1.0,
        strategy: str = "partial",
        keep: str = "count",
        phase: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(pretrained, str):
            settings = {"united_experts": united_experts, "ways": ways}
            given = {key: value for key, value in settings.items() if value is not None}
            kwargs["moe_opt"] = MoEOptConfig.from_dict(given)
        elif united_experts is not None or ways is not None:
            raise ConfigError("united_experts and ways are for a model given by path: attach them to the model instead")
        elif not hasattr(pretrained, "moe_opt"):
            raise ConfigError("the model was not loaded with moe_opt: use from_pretrained(..., moe_opt=True)")
        super().__init__(pretrained, backend="causal", **kwargs)
        if threshold != 1.0:
            self.model.moe_opt.set_brownout(threshold=float(threshold), strategy=strategy, keep=keep, phase=phase)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        batch_size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else _DEFAULT_BATCH)
        quiet = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=quiet, desc="log-likelihoods", mininterval=1.0) as bar:
            found = continuation_log_probs(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                batch_size=batch_size,
                max_length=self.max_length,
                progress=bar.update,
            )
        answers = [(one.log_prob, one.greedy) for one in found]
        for (text, _context, _continuation), answer in zip(requests, answers, strict=True):
            if text is not None:  # parts of a rolling window have no text of their own
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers


def main() -> None:
    """lm-eval's own command line, with the model type `moe_opt` known."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
