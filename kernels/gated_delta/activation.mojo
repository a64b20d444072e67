"""SiLU and the gates in float32, for vectors of any width.

Spelled in explicit fma and in no function of a library, so that an element has the same bits in a
vector of any width. Nothing depends on a subnormal number either, which some threads flush to zero
and others do not. What is not finite comes out as these formulas have it: NaN stays NaN, and
silu(-inf) = -inf * 0 is one.
"""

from std.math import fma
from std.memory import bitcast
from std.utils.numerics import isnan

comptime F32 = DType.float32


@always_inline
def exp[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """e^x to about an ulp, and zero below the normal numbers."""
    # x = k ln 2 + r, |r| <= ln 2 / 2; adding the magic number leaves k in its last bits.
    comptime MAGIC = Float32(12582912.0)
    comptime LOG2_E = Float32(1.44269504)
    # ln 2 in two parts: k times the first is exact.
    comptime LN2_HIGH = Float32(0.693359375)
    comptime LN2_LOW = Float32(-0.000212194440)
    comptime LEAST = Float32(-87.3)
    # Above 90 the scaling below gives infinity by itself.
    var bounded = max(min(x, SIMD[F32, n](90)), SIMD[F32, n](LEAST))
    var shifted = fma(bounded, SIMD[F32, n](LOG2_E), SIMD[F32, n](MAGIC))
    var k = shifted - MAGIC
    var r = fma(k, SIMD[F32, n](-LN2_HIGH), bounded)
    r = fma(k, SIMD[F32, n](-LN2_LOW), r)
    # e^r = 1 + r + r^2 p(r), p fitted to the least relative error: 4e-9.
    var p = SIMD[F32, n](0.00138144672)
    p = fma(p, r, SIMD[F32, n](0.00836878084))
    p = fma(p, r, SIMD[F32, n](0.0416683927))
    p = fma(p, r, SIMD[F32, n](0.166665196))
    p = fma(p, r, SIMD[F32, n](0.49999994))
    p = fma(p, r * r, r) + 1
    # Two factors, since 2^128 is no number where its product with p may be.
    var exponent = bitcast[DType.int32, n](shifted) - bitcast[DType.int32, 1](MAGIC)
    var half = exponent >> 1
    var scaled = p * power_of_2(half) * power_of_2(exponent - half)
    return isnan(x).select(x, x.lt(LEAST).select(SIMD[F32, n](0), scaled))


@always_inline
def power_of_2[n: Int](k: SIMD[DType.int32, n]) -> SIMD[F32, n]:
    return bitcast[F32, n]((k + 127) << 23)


@always_inline
def sigmoid[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """1 / (1 + e^-x), of which neither part overflows."""
    var e = exp(-abs(x))
    return x.lt(0).select(e, SIMD[F32, n](1)) / (e + 1)


@always_inline
def silu[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """x sigmoid(x)."""
    var e = exp(-abs(x))
    return x.lt(0).select(x * e, x) / (e + 1)


@always_inline
def softplus[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """log(1 + e^x), which is max(x, 0) + log(1 + e^-|x|)."""
    # log(1 + e) = 2 atanh(s / 2) for s = e / (1 + e / 2) <= 2/3: s + s z p(z), z = (s / 2)^2.
    var e = exp(-abs(x))
    var s = e / fma(e, SIMD[F32, n](0.5), SIMD[F32, n](1))
    var z = s * s * 0.25
    var p = SIMD[F32, n](0.140059933)
    p = fma(p, z, SIMD[F32, n](0.140009031))
    p = fma(p, z, SIMD[F32, n](0.200107634))
    p = fma(p, z, SIMD[F32, n](0.333332092))
    return fma(p * z, s, s) + max(x, SIMD[F32, n](0))


@always_inline
def decay[n: Int](a: SIMD[F32, n], rate: SIMD[F32, n], dt_bias: SIMD[F32, n]) -> SIMD[F32, n]:
    """exp(-rate softplus(a + dt_bias)), where rate is exp(A_log)."""
    return exp(-(rate * softplus(a + dt_bias)))
