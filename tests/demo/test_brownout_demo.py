"""`moe-opt demo brownout` end to end on the demo model, as `make demo` runs it."""

from moe_opt.cli import main
from moe_opt.demo.model import demo_texts


def test_the_demo_prints_its_table_and_draws_its_plot(demo_model_dir, tmp_path, capsys):
    assert main(["demo", "brownout", "--model", str(demo_model_dir), "--output", str(tmp_path), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("|")][2:]
    assert rows[0].startswith("| exact | 1 |")
    read = [float(row.split("|")[3]) for row in rows]
    assert all(later <= read[0] for later in read)
    for strategy in ("8-way", "full brownout", "reroute", "top-k"):
        assert any(strategy in row for row in rows)
    for domain in ("code", "russian", "chinese"):
        assert domain in out
    assert (tmp_path / "brownout.png").stat().st_size > 10_000
    assert (tmp_path / "brownout.md").read_text().count("\n") == len(rows) + 4


def test_the_demo_texts_cover_ten_domains_and_none_is_in_the_training_corpus(data_dir):
    import gzip
    import json

    texts, prompts = demo_texts()
    assert len(texts) == 10
    assert texts.keys() == prompts.keys()
    ours = {line.strip() for group in texts.values() for text in group for line in text.splitlines() if len(line) > 60}
    for path in sorted((data_dir / "corpus").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for row in file:
                for line in json.loads(row)["text"].splitlines():
                    assert line.strip() not in ours
