"""Flags, environment variables and their order."""

import argparse

import pytest

from moe_opt.errors import ConfigError
from moe_opt.serving.launch_flags import FLAGS, add_arguments, given_flags, resolve


def resolved(*argv, **env):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(argv), env)


def test_the_command_line_wins_over_the_environment_which_wins_over_the_default():
    values, _ = resolved("--model-id", "a", "--port", "1", MODEL_ID="b", PORT="2", MAX_BEST_OF="7")
    assert (values["model_id"], values["port"], values["max_best_of"]) == ("a", 1, 7)
    assert (values["hostname"], values["max_concurrent_requests"]) == ("0.0.0.0", 128)
    assert (values["payload_limit"], values["max_client_batch_size"]) == (2_000_000, 4)


def test_every_flag_has_an_environment_variable():
    texts = {"int": "3", "float": "0.5", "str": "x"}
    for flag in FLAGS:
        text = {
            "dtype": "float32",
            "experts_kernels": "eager",
            "brownout_layers": "1-3",
            "cors_allow_origin": "a,b",
            "kv_role": "decode",
            "replica_choice": "greedy",
            "prefill_dispatch": "all-to-all",
        }.get(flag.key, texts.get(getattr(flag.parse, "__name__", ""), "true"))
        if flag.key == "max_input_length":
            continue
        values, _ = resolved("--model-id", "m", **{flag.variable: text})
        if flag.key != "model_id":
            assert values[flag.key] == flag.parse(text)


def test_the_command_line_of_a_rank_is_that_of_its_group():
    argv = ["--model-id", "m", "--port", "0", "--json-output", "--expert-parallel", "2", "--num-shard", "1"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    again = parser.parse_args(given_flags(parser.parse_args(argv)))
    assert vars(again) == vars(parser.parse_args(argv))


def test_what_tgis_launcher_and_its_tests_pass_is_taken():
    argv = ["--model-id", "m", "--port", "8080", "--master-port", "29500", "--shard-uds-path", "/x", "--num-shard", "1"]
    argv += ["--dtype", "bfloat16"]
    values, warnings = resolved(*argv, "--waiting-served-ratio", "0.3", "--cuda-graphs", "0", SHARDED="false")
    assert (values["dtype"], values["cuda_graphs"]) == ("bfloat16", False)
    assert any("--waiting-served-ratio" in warning for warning in warnings)


def test_older_names_switches_and_empty_variables():
    assert resolved("m", MAX_INPUT_LENGTH="100")[0]["max_input_tokens"] == 100
    assert resolved("m", LOG_FORMAT="json")[0]["json_output"] is True
    assert resolved("m", "--json-output")[0]["json_output"] is True
    assert resolved("m", "--json-output", "false")[0]["json_output"] is False
    assert resolved("m", PREFIX_CACHING="0")[0]["prefix_caching"] is False
    assert resolved("m", QUANTIZE="", MAX_BATCH_SIZE="", PORT="")[0]["port"] == 3000
    assert resolved("m", "--brownout-layers", "2-4,7")[0]["brownout_layers"] == (2, 3, 4, 7)


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ([], {}),
        (["a", "--model-id", "b"], {}),
        (["m", "--max-input-tokens", "5"], {"MAX_INPUT_LENGTH": "5"}),
        (["m", "--num-shard", "4"], {}),
        (["m"], {"QUANTIZE": "bitsandbytes"}),
        (["m"], {"KV_CACHE_DTYPE": "fp8_e4m3fn"}),
        (["m"], {"PORT": "http"}),
        (["m", "--prefix-caching", "perhaps"], {}),
    ],
)
def test_contradictions_and_what_cannot_be_honoured_are_refused(argv, env):
    with pytest.raises(ConfigError):
        resolved(*argv, **env)
