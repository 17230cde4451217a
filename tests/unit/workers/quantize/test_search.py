"""Activation-aware scales and clipping: never worse than plain rounding on what they were searched with, better where
channels differ."""

import torch

from penstock.workers.compute.quant.quantized import quantize
from penstock.workers.quantize.search import clip_groups, find_scales

GROUP = 32


def inputs(loud: float) -> torch.Tensor:
    """[256, 64]; a few channels are `loud` times the others."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    x[:, ::16] *= loud
    return x


def error(x: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x @ (rounded - weight).t()).square().sum())


def weight() -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(4))


def test_loud_channels_are_scaled_up_and_that_pays() -> None:
    x, w = inputs(loud=30), weight()
    scales = find_scales(w, x.abs().mean(0), x.t() @ x, GROUP)

    assert scales[::16].mean() > 2 * scales[1::16].mean()
    assert error(x, w, quantize(w * scales, GROUP).dequantize() / scales) < 0.6 * error(
        x, w, quantize(w, GROUP).dequantize()
    )


def test_scales_are_never_worse_than_none() -> None:
    x, w = inputs(loud=1), weight()
    scales = find_scales(w, x.abs().mean(0), x.t() @ x, GROUP)

    assert (
        error(x, w, quantize(w * scales, GROUP).dequantize() / scales)
        <= error(x, w, quantize(w, GROUP).dequantize()) * 1.0001
    )


def test_clipping_trades_an_outlier_for_everything_else() -> None:
    x, w = inputs(loud=1), weight()
    x[:, 5] *= 1e-3  # nobody listens to the channel that holds the outliers
    w[:, 5] = 8.0

    assert error(x, w, clip_groups(w, x.t() @ x, GROUP).dequantize()) < 0.8 * error(
        x, w, quantize(w, GROUP).dequantize()
    )


def test_a_short_last_group_is_clipped_like_the_others() -> None:
    x, w = inputs(loud=1)[:, :40], weight()[:, :40]

    quantized = clip_groups(w, x.t() @ x, GROUP)

    assert quantized.q.shape == (48, 40)
    assert error(x, w, quantized.dequantize()) <= error(x, w, quantize(w, GROUP).dequantize()) * 1.0001
