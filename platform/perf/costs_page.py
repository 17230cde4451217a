"""Step costs as numbers by name, for a page of metrics, and back.

Not the model. Invariant: `read_costs` of `show_costs` is the same costs.
"""

from collections.abc import Mapping

from msgspec.structs import asdict

from penstock.wire.frames import Stairs, StepCosts

_CLIFF = "cliff_"
_PLACES = ("recorded_rows", "recorded_tokens", "eager_knee_s")


def show_costs(costs: StepCosts) -> dict[str, float]:
    """Coefficients by the names of `StepCosts`, and of the stairs where there are any; seconds of the cliff beyond N
    tokens are `cliff_N`."""
    shown: dict[str, float] = {name: value for name, value in asdict(costs).items() if name != "stairs"}
    if costs.stairs is not None:
        shown |= {name: getattr(costs.stairs, name) for name in _PLACES}
        shown |= {f"{_CLIFF}{place}": seconds for place, seconds in costs.stairs.cliffs}
    return shown


def read_costs(shown: Mapping[str, float]) -> StepCosts:
    """The costs; names that are not known, of a later version, are passed over."""
    names = [name for name in StepCosts.__struct_fields__ if name != "stairs"]
    cliffs = sorted((int(name.removeprefix(_CLIFF)), value) for name, value in shown.items() if name.startswith(_CLIFF))
    stairs = None
    if "recorded_rows" in shown:
        stairs = Stairs(
            int(shown["recorded_rows"]),
            int(shown.get("recorded_tokens", 0)),
            shown.get("eager_knee_s", 0.0),
            tuple(cliffs),
        )
    return StepCosts(**{name: shown[name] for name in names if name in shown}, stairs=stairs)
