"""The command line as a user meets it: help, failures in one line, exit codes."""

import json
import subprocess
import sys

import pytest

from moe_opt.cli import COMMANDS, main


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"moe-opt {name}" in capsys.readouterr().out.split("example:")[1]


def test_no_command_prints_the_list(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_listing_commands_imports_no_torch():
    code = "import sys; from moe_opt.cli import main; main([]); print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no/such/folder/here"], "no model folder at no/such/folder/here"),
        (["demo", "brownout", "--model", "./nowhere"], "no model folder at ./nowhere"),
        (["demo", "brownout", "--threads", "0"], "--threads must be at least 1"),
        (["inspect"], "the following arguments are required: model (see moe-opt inspect --help)"),
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["demo", "nostage"], "invalid choice: 'nostage'"),
    ],
)
def test_failures_are_one_line_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    err = capsys.readouterr().err
    assert message in err
    lines = [line for line in err.splitlines() if line.startswith("moe-opt")]
    assert len(lines) == 1


def test_inspect_reports_what_the_config_says(tmp_path, capsys):
    from transformers import Qwen2MoeConfig

    Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=10,
        shared_expert_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=3, decoder_sparse_step=1, mlp_only_layers=[0],
    ).save_pretrained(tmp_path)  # fmt: skip
    assert main(["inspect", str(tmp_path), "--json", "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["moe_layers"], report["layers"], report["experts"], report["top_k"]) == (2, 3, 10, 3)
    one_expert = 3 * 32 * 16
    assert report["parameters"]["routed experts"] == 2 * 10 * one_expert
    assert report["bytes_per_expert"] == 2 * one_expert
    total, active = report["parameters"]["total"], report["parameters"]["active per token"]
    assert total - active == 2 * (10 - 3) * one_expert
    assert report["united"]["4-way"] == {"united_experts": 3, "extra_bytes": 2 * 3 * one_expert * 2}
    assert main(["inspect", str(tmp_path)]) == 0
    assert "10, top-3" in capsys.readouterr().out


def test_inspect_refuses_dense_models(tmp_path, capsys):
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "dense model" in capsys.readouterr().err
