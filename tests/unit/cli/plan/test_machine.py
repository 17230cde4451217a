import pytest

from penstock.base.errors import ConfigError
from penstock.cli.plan.machine import measure_machine
from penstock.perf.planning.formats import BF16, INT4, KV_FORMATS, held_on_cpu, mix
from penstock.perf.planning.loads import decode_alone
from penstock.perf.planning.roofline import Roofline
from penstock.perf.planning.shape import parse_shape

SHAPE = parse_shape("layers=4,hidden=256,heads=4,kv_heads=2,inner=512,vocab=1024")


@pytest.mark.parametrize("much", ["hidden=1e9", "vocab=1e15", "head_dim=1e12"])
def test_a_layer_that_no_machine_holds_is_refused_before_it_is_made_up(much: str) -> None:
    shape = parse_shape(f"layers=4,hidden=256,heads=4,kv_heads=2,inner=512,vocab=1024,{much}")

    with pytest.raises(ConfigError, match="GB to be measured, and this machine has"):
        measure_machine(shape, [held_on_cpu(BF16)], threads=1)


@pytest.mark.slow
def test_a_machine_is_measured_in_seconds_and_gives_step_times() -> None:
    mixed = mix({BF16: 1.0, INT4: 3.0})
    machine = measure_machine(SHAPE, [held_on_cpu(form) for form in (BF16, INT4, mixed)], threads=1)

    assert machine.memory_bytes > 10**8
    for form in (BF16, INT4, mixed):
        rates = machine.rates[form.name]
        assert rates.bandwidth > 1e8
        assert min(rates.products.flops) > 1e7
        times = Roofline(SHAPE, held_on_cpu(form), KV_FORMATS["bf16"], rates)
        assert 0 < decode_alone(times, 1, 64).tpot_s < 1
        assert decode_alone(times, 8, 64).tokens_s > decode_alone(times, 1, 64).tokens_s / 2
