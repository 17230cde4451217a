"""The `penstock` command."""

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from penstock.base.environment import cluster_secret
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.pod import DRAIN_S, POD_DIR
from penstock.base.pod import drain as drain_pod
from penstock.base.redis_roles import ROLES, acl_rules, user_of
from penstock.base.subsecrets import format_replica_secrets, replica_secrets
from penstock.cli.cluster import StartFailed
from penstock.cli.config import load_platform
from penstock.cli.explain import explain
from penstock.cli.plan.command import plan
from penstock.cli.prefix_commands import prefixes
from penstock.cli.receipt import STDIN, explain_receipt, read_receipt
from penstock.cli.refusals import REFUSED, complain, refusing
from penstock.cli.state import StateDir, write_private
from penstock.cli.status import observe, own_client, show
from penstock.cli.tenant_commands import keys, tenants, usage
from penstock.cli.tiers.commands import tiers
from penstock.cli.up import up as run
from penstock.tenancy.tenants import DEFAULT_TIER_POLICY, TIER_POLICIES

FAILED = 1
DEFAULT_DRAIN_S = 60.0
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, by the convention of shells."""
app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Multi-replica LLM serving."
)
autoscaling = typer.Typer(help="The autoscaler of a RayService, and why targets are what they are.")
StateOption = Annotated[Path, typer.Option("--state", help="State folder: key, Redis data, what runs.")]
DEFAULT_STATE = Path(".penstock")


@app.command()
def up(
    config: Annotated[
        Path, typer.Option("--config", help="What to start; penstock.yaml documents every field.")
    ] = Path("penstock.yaml"),
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Start Redis, Ray, the pools and a gateway; Ctrl-C stops everything."""
    console = Console(file=sys.stdout)
    try:
        run(load_platform(config), config, StateDir(state), console)
    except StartFailed as error:
        complain(error)
        if error.detail:
            print(error.detail, file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error


@app.command()
def status(
    state: StateOption = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show what runs here and whether it is well; exit status 0 only when ready."""
    try:
        found = StateDir(state).read()
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error
    if found is None:
        print("null" if as_json else f"Nothing runs with the state folder {state}; start it with: penstock up")
        raise typer.Exit(FAILED)
    with refusing(), own_client(found.shown) as client:
        health = observe(found, client)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(health)).decode())
    else:
        show(health, Console())
    raise typer.Exit(0 if health.is_ready else FAILED)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="GGUF file, safetensors directory, hub id, or demo.")],
    out: Annotated[Path, typer.Argument(help="Folder of the 4-bit checkpoint; must not exist.")],
    calibration: Annotated[
        Path,
        typer.Option(
            help="Text that the model will be used for: plain, or JSON lines with prompt, text, question or turns."
        ),
    ],
    evaluation: Annotated[
        Path | None,
        typer.Option(help="Other text, whose perplexity is printed: before, after, and rounded to nearest."),
    ] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 128,
    sequences: Annotated[int, typer.Option(help="Sequences of 512 tokens to calibrate with, at most.")] = 32,
) -> None:
    """Make a 4-bit AWQ checkpoint. One that was interrupted goes on where it was when the command is given again."""
    # read when torch is loaded: its threads else spin while they wait for each other, which on a busy machine takes
    # three times the CPU time
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from penstock.cli import quantize as command  # noqa: PLC0415 (torch takes seconds to import)

    try:
        command.quantize(
            model, out, calibration, evaluation, group_size=group_size, sequences=sequences, console=Console()
        )
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on where this one was.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error


@app.command("train-drafter")
def train_drafter(
    model: Annotated[str, typer.Argument(help="GGUF file, safetensors directory, hub id, or demo.")],
    out: Annotated[Path, typer.Argument(help="Folder of the training; its head.safetensors is the result.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with turns, prompt, question or text; may be given several times."),
    ] = None,
    made_prompts: Annotated[
        int, typer.Option(help="Prompts that the model makes up itself, beside those of files.", min=0)
    ] = 0,
    minutes: Annotated[
        float, typer.Option(help="Time for the training itself; earlier runs in the folder count.")
    ] = 60,
    epochs: Annotated[int, typer.Option(help="Times that each answer is read, at most.", min=1)] = 4,
    start: Annotated[
        Path | None, typer.Option("--from", help="A head to go on from; without it, the model's last layer is.")
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(help="So many prompts are drawn; without it, all are asked.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Longest answer that is learned from, in tokens.")] = 256,
    learn_prompts: Annotated[
        bool, typer.Option(help="Learn what the model says of the prompts' own tokens too.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(help="Of what is made up, sampled and shuffled: another one has other texts.", min=0, max=2**32),
    ] = 0,
    bits: Annotated[int, typer.Option(help="Of the head's matrices, 4 or 8.", min=4, max=8)] = 8,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens that it can propose, those that answers have most often.", min=1)
    ] = 8192,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where it is computed; without it, on a GPU where torch finds one."),
    ] = None,
) -> None:
    """Train a draft head on the model's own answers to prompts. One that was interrupted goes on where it was when the
    command is given again."""
    # as for quantize
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from penstock.cli import train_drafter as command  # noqa: PLC0415 (torch takes seconds to import)
    from penstock.workers.drafter_training.training import Plan, best_device  # noqa: PLC0415 (the same)

    try:
        plan = Plan(
            model,
            prompts or [],
            out,
            minutes,
            epochs,
            vocabulary=vocabulary,
            bits=bits,
            max_prompts=max_prompts,
            made_prompts=made_prompts,
            learns_prompts=learn_prompts,
            max_answer_tokens=answer_tokens,
            start=start,
            seed=seed,
            device=best_device() if device is None else device,
        )
        command.train(plan, Console())
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on where this one was.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error


@autoscaling.callback(invoke_without_command=True)
def autoscale(
    context: typer.Context,
    namespace: Annotated[str | None, typer.Option(help="Of the RayService.")] = None,
    lease: Annotated[str | None, typer.Option(help="Its name: of all that stand for it, one acts.")] = None,
    rayservice: Annotated[str | None, typer.Option(help="Whose pools to scale.")] = None,
    raycluster: Annotated[str | None, typer.Option(help="Instead of a RayService: this RayCluster.")] = None,
    config: Annotated[
        Path, typer.Option("--config", help="The platform's configuration, as its gateways have it.")
    ] = Path("penstock.yaml"),
    port: Annotated[int, typer.Option(help="Of /healthz and /metrics.")] = 8081,
    account: Annotated[Path, typer.Option(help="Folder of the service account's token and ca.crt.")] = Path(
        "/var/run/secrets/kubernetes.io/serviceaccount"
    ),
) -> None:
    """Scale the pools of a RayService, in Kubernetes. Stays until it is ended."""
    if context.invoked_subcommand is not None:
        return
    from penstock.autoscale.kubernetes.run import Options  # noqa: PLC0415 (Ray takes a second to import)
    from penstock.cli import autoscale as command  # noqa: PLC0415 (imports Ray too)

    with refusing():
        if namespace is None or lease is None:
            raise ConfigError("--namespace and --lease must be given; `penstock autoscale explain` needs neither")
        if (rayservice is None) == (raycluster is None):
            raise ConfigError("either --rayservice or --raycluster must be given")
        command.run(config, Options(namespace, rayservice, raycluster, lease, port, account))


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario of penstock-loadtest, or the name of an example.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; must not hold one.")],
    config: Annotated[Path, typer.Option("--config", help="The platform, with runner: timed in its pools.")] = Path(
        "penstock.yaml"
    ),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A change of the scenario, like arrivals.rate=4; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of step times, starts and ties; the load has its own.")] = 0,
    start_s: Annotated[
        float | None, typer.Option("--start", help="Seconds a replica takes to start; default: autoscale.start_s.")
    ] = None,
    start_jitter: Annotated[float, typer.Option(help="Spread of that time, as a part of it.")] = 0.3,
    model_error: Annotated[
        float, typer.Option(help="Factor by which the costs that the policies predict with are wrong.")
    ] = 1.0,
    tier_policy: Annotated[str, typer.Option(help=f"Of every tenant of the load: {', '.join(TIER_POLICIES)}.")] = (
        DEFAULT_TIER_POLICY
    ),
    faults: Annotated[
        Path | None, typer.Option("--faults", help="YAML of what goes wrong about the autoscaler: docs/simulator.md.")
    ] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Class of a tenant of the load, like acme=batch; repeatable.")
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Whether to draw report.html.")] = True,
) -> None:
    """Play a load against modelled replicas, under this platform's own routing and scaling; nothing is served."""
    from penstock.cli import simulate as command  # noqa: PLC0415 (Ray and matplotlib take seconds to import)
    from penstock.sim.config import SimulationConfig  # noqa: PLC0415 (as above)

    with refusing():
        wrong = command.load_faults(faults)
        simulation = SimulationConfig(
            seed=seed,
            start_s=start_s,
            start_jitter=start_jitter,
            model_error=model_error,
            tier_policy=command.read_tier_policy(tier_policy),
            gateways=wrong.gateways,
            faults=wrong.faults,
            classes=command.read_classes(classes or []),
        )
        command.run(config, scenario, settings or [], out, simulation, Console(), plots=plots)


@app.command()
def receipt(
    file: Annotated[Path, typer.Argument(help="Answer of GET /v1/receipts/ID; - reads it from stdin.")] = STDIN,
) -> None:
    """Make the decision of a receipt again and show what each replica would have cost; exit status 0 only if it is
    the same."""
    with refusing():
        is_same = explain_receipt(read_receipt(file), Console())
    raise typer.Exit(0 if is_same else FAILED)


@app.command()
def drain(
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="Longest wait, seconds; default: PENSTOCK_DRAIN_S, else 60.")
    ] = None,
) -> None:
    """Let the gateway or replica of this pod finish what runs; exit status 0 when it has, or nobody serves there."""
    folder = os.environ.get(POD_DIR)
    if not folder:
        complain(ConfigError(f"{POD_DIR} is not set: this is no pod of the platform"))
        raise typer.Exit(REFUSED)
    has_drained = drain_pod(
        Path(folder), timeout_s if timeout_s is not None else float(os.environ.get(DRAIN_S) or DEFAULT_DRAIN_S)
    )
    raise typer.Exit(0 if has_drained else FAILED)


@app.command("replica-secrets")
def write_replica_secrets(
    file: Annotated[Path, typer.Argument(help="Where to; replaced, readable by its owner only.")],
) -> None:
    """Write what a replica needs of PENSTOCK_CLUSTER_SECRET, and no more, for its PENSTOCK_REPLICA_SECRETS."""
    with refusing():
        write_private(file, format_replica_secrets(replica_secrets(cluster_secret())).encode())


@app.command("redis-acl")
def print_redis_acl() -> None:
    """Print the users that a Redis of your own should have, as ACL SETUSER commands; put passwords in."""
    for role in ROLES:
        print(f"ACL SETUSER {user_of(role)} on '>PASSWORD' {acl_rules(role)}")


@app.command()
def version() -> None:
    """Print the installed version."""
    print(installed_version("penstock"))


autoscaling.command("explain")(explain)
app.add_typer(autoscaling, name="autoscale")
app.add_typer(tenants, name="tenant")
app.add_typer(keys, name="key")
app.add_typer(prefixes, name="prefix")
app.command()(plan)
app.add_typer(tiers, name="tiers")
app.command()(usage)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
