import pytest

from penstock.autoscale.config import AutoscaleConfig
from penstock.base.errors import ConfigError
from penstock.cli.applications import pool_spec
from penstock.cli.config import PoolConfig
from penstock.text.source import resolve
from penstock.workers.config import AdapterSlots, EngineConfig, TimedConfig
from penstock.workers.engine.timed import TimedRunner


def test_a_gateway_is_told_the_context_that_is_configured_or_else_the_checkpoints() -> None:
    engine = EngineConfig(runner="timed", timed=TimedConfig(max_model_len=1000))

    assert pool_spec(PoolConfig(name="a", engine=engine)).max_model_len == 1000
    assert pool_spec(PoolConfig(name="a", engine=EngineConfig(max_model_len=512))).max_model_len == 512
    assert pool_spec(PoolConfig(name="a")).max_model_len == resolve("demo").max_model_len


@pytest.mark.parametrize("configured", [None, 40, 1000])
@pytest.mark.parametrize("num_blocks", [4, 4096])
def test_a_gateway_is_told_the_context_that_a_timed_replica_has(configured: int | None, num_blocks: int) -> None:
    engine = EngineConfig(runner="timed", max_model_len=configured, timed=TimedConfig(num_blocks=num_blocks))

    assert pool_spec(PoolConfig(name="a", engine=engine)).max_model_len == TimedRunner(engine).max_model_len


def test_made_up_tokens_that_the_tokenizer_lacks_are_refused() -> None:
    engine = EngineConfig(runner="timed", timed=TimedConfig(vocab_size=49153))

    with pytest.raises(
        ConfigError, match=r"pool a: engine\.timed\.vocab_size is 49153, but demo has only 49152 tokens"
    ):
        pool_spec(PoolConfig(name="a", engine=engine))


def test_a_pool_is_named_alike_for_serve_and_for_gateways() -> None:
    spec = pool_spec(PoolConfig(name="a", served_names=("x",), tier="edge", engine=EngineConfig(runner="timed")))

    assert (spec.app_name, spec.served_names, spec.tier) == ("pool-a", ("x",), "edge")


def test_gateways_are_told_which_pools_answer_exactly() -> None:
    def is_exact(engine: EngineConfig) -> bool:
        return pool_spec(PoolConfig(name="a", engine=engine)).exact

    assert is_exact(EngineConfig(exact=True))
    assert is_exact(EngineConfig(runner="timed")), "its tokens are made of the request alone"
    assert not is_exact(EngineConfig())


def test_gateways_are_told_which_pools_are_scaled() -> None:
    timed = EngineConfig(runner="timed")

    assert not pool_spec(PoolConfig(name="a", engine=timed)).is_scaled
    assert pool_spec(PoolConfig(name="a", autoscale=AutoscaleConfig(), engine=timed)).is_scaled


def test_gateways_are_told_how_many_replicas_a_pool_has_unless_the_autoscaler_decides() -> None:
    def wanted(autoscale: AutoscaleConfig | None) -> int | None:
        engine = EngineConfig(runner="timed")
        return pool_spec(PoolConfig(name="a", replicas=3, autoscale=autoscale, engine=engine)).num_replicas

    assert wanted(None) == 3
    assert wanted(AutoscaleConfig(max_replicas=4)) is None
    assert wanted(AutoscaleConfig(max_replicas=4, dry_run=True)) == 3, "it changes nothing"


def test_gateways_are_told_what_an_adapter_of_a_pool_must_be_like() -> None:
    base = pool_spec(PoolConfig(name="a", engine=EngineConfig(adapters=AdapterSlots(max_rank=12)))).adapters

    assert base is not None
    assert (base.max_rank, base.shapes.num_layers) == (12, 30)
    assert base.shapes.modules == {
        "q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576),
        "gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536),
    }  # fmt: skip
    assert pool_spec(PoolConfig(name="a", engine=EngineConfig(adapters=AdapterSlots(slots=0)))).adapters is None
    of_vllm = pool_spec(PoolConfig(name="a", engine=EngineConfig(runner="vllm"))).adapters
    assert of_vllm == pool_spec(PoolConfig(name="a")).adapters


def test_a_form_of_tools_that_the_models_template_does_not_have_is_refused_at_start() -> None:
    timed = EngineConfig(runner="timed")

    assert pool_spec(PoolConfig(name="a", tool_parser="text", engine=timed)).tool_parser == "text"
    assert pool_spec(PoolConfig(name="a", reasoning_parser="none", engine=timed)).reasoning_parser == "none"
    with pytest.raises(ConfigError, match="tool_parser: hermes is for a chat template that shows tools"):
        pool_spec(PoolConfig(name="a", tool_parser="hermes", engine=timed))
