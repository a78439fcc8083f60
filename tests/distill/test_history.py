"""What a checkpoint says of the runs that led to it."""

from hypothesis import given
from hypothesis import strategies as st

from moe_opt.distill.history import runs, with_history

SETTINGS = st.fixed_dictionaries(
    {
        "ways": st.lists(st.sampled_from([2, 4, 8]), min_size=1),
        "logits": st.fixed_dictionaries({"steps": st.integers(1, 4), "threshold": st.tuples(st.floats(0, 1))}),
        "ridge": st.none() | st.floats(0, 1),
    }
)


@given(st.lists(SETTINGS, min_size=1, max_size=4))
def test_every_run_can_be_told_again(recipes):
    told = None
    for recipe in recipes:
        told = with_history({**recipe, "start": "somewhere" if told else None}, told)
    assert runs(told) == recipes[::-1]


def test_only_what_differs_is_told():
    first = {
        "model": {"name": "m", "dtype": "float32"},
        "logits": {"steps": 100, "learning_rate": 0.005},
        "start": None,
    }
    second = {
        "model": {"name": "m", "dtype": "float32"},
        "logits": {"steps": 800, "learning_rate": 0.005},
        "start": "x",
    }
    told = with_history(second, first)
    assert told == {"model": second["model"], "logits": second["logits"], "earlier": [{"logits": {"steps": 100}}]}


def test_checkpoints_of_before_are_read():
    nested = {"steps": 3, "start": {"steps": 2, "start": {"steps": 1, "start": None}}}
    assert [run["steps"] for run in runs(nested)] == [3, 2, 1]
    assert with_history({"steps": 4}, nested) == {"steps": 4, "earlier": [{"steps": 3}, {"steps": 2}, {"steps": 1}]}


def test_a_remark_belongs_to_one_run() -> None:
    first = with_history({"steps": 1, "remark": "stopped once"}, None)
    third = with_history({"steps": 3}, with_history({"steps": 2}, first))
    assert third == {"steps": 3, "earlier": [{"steps": 2}, {"steps": 1, "remark": "stopped once"}]}
    assert runs(with_history({"steps": 4, "remark": "new"}, third))[1:] == [{"steps": 3}, {"steps": 2}, first]
