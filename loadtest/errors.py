"""The exception tree: every message is a whole sentence that the command prints as it stands, without a traceback."""


class LoadtestError(Exception):
    """Root of the errors that the tester raises on purpose."""


class ScenarioInvalid(LoadtestError):
    """A scenario, or an option that changes it, can't be run."""


class TraceInvalid(LoadtestError):
    """A line of a trace or corpus can't be read; the message names file and line."""


class TargetUnreachable(LoadtestError):
    """The server is not there, or is not one that speaks the OpenAI API."""


class RecordsInvalid(LoadtestError):
    """A records file can't be read; the message names file and line."""
