"""A model's configuration as its file holds it, read field by field."""

from collections.abc import Mapping

from penstock.base.errors import ConfigError


class Fields:
    """Typed access to a mapping somebody else wrote. A default of None makes a field required; JSON's null counts as
    absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._mistyped(key, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._mistyped(key, "a number")

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if isinstance(value, bool):
            return value
        raise self._mistyped(key, "true or false")

    def nested(self, key: str) -> "Fields":
        value = self.values.get(key)
        if value is None or isinstance(value, dict):
            return Fields(value or {}, f"{key} of {self.where}")
        raise self._mistyped(key, "an object")

    def _present(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} has no {key}, which a model of this kind needs")
        return value

    def _mistyped(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{key} in {self.where} must be {wanted}, not {self.values.get(key)!r}")
