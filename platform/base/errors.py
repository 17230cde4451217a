"""The root of Penstock's exception tree, and the error of a configuration. The rest of the tree stands in
`penstock.wire.errors`."""


class PenstockError(Exception):
    """Root of the tree. `param` names the request field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigError(PenstockError):
    """Raised at start, with a sentence that names the offending value."""
