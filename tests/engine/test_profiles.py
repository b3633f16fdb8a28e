import pytest
from perfcast_engine.backends import BACKENDS, backend_named
from perfcast_engine.errors import InvalidField, UnknownName
from perfcast_engine.profiles import CORRECTED, REFERENCE, SWITCHES, profile_named


def test_every_switch_is_named_once_has_a_reason_and_changes_something():
    assert len({switch.name for switch in SWITCHES}) == len(SWITCHES)
    for switch in SWITCHES:
        assert switch.reason
        assert REFERENCE[switch] == switch.reference != CORRECTED[switch]


def test_the_default_profile_is_corrected_and_unknown_names_are_refused():
    assert profile_named("") is CORRECTED
    assert profile_named("reference") is REFERENCE
    with pytest.raises(InvalidField, match="corrected, reference"):
        profile_named("tuned")


@pytest.mark.parametrize(
    ("gib_bytes", "tp", "dp", "fraction"),
    [
        (151397597184, 1, 1, 0.907),
        (151397597184, 8, 1, 0.897),
        (151397597184, 1, 8, 0.864),
        (193273528320, 1, 1, 0.858),
        (193273528320, 8, 1, 0.853),
        (193273528320, 1, 8, 0.758),
        (85899345920, 1, 1, 0.836),
        (85899345920, 8, 1, 0.819),
        (85899345920, 1, 8, 0.761),
    ],
)
def test_derived_static_fraction(gib_bytes, tp, dp, fraction):
    assert BACKENDS["sglang"].kv_derived(gib_bytes, tp, 1, dp) == fraction


def test_backends_are_known_by_name():
    assert set(BACKENDS) == {"trtllm", "sglang", "vllm"}
    with pytest.raises(UnknownName, match="did you mean vllm"):
        backend_named("vlm")
