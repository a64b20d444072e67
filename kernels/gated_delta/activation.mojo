"""SiLU and the gates in float32, for vectors of any width.

Spelled in explicit fma and in no function of a library, so that an element has the same bits in a
vector of any width. What is not finite comes out as these formulas have it: NaN stays NaN, and
silu(-inf) = -inf * 0 is one.
"""

from std.math import fma
from std.memory import bitcast

comptime F32 = DType.float32


@always_inline
def exp_negative[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """e^x of x <= 0, to about an ulp; zero where it is no normal number."""
    # x = k ln 2 + r, |r| <= ln 2 / 2; adding the magic number leaves k in its last bits.
    comptime MAGIC = Float32(12582912.0)
    comptime LOG2_E = Float32(1.44269504)
    # ln 2 in two parts: k times the first is exact.
    comptime LN2_HIGH = Float32(0.693359375)
    comptime LN2_LOW = Float32(-0.000212194440)
    comptime LEAST = Float32(-87.3)
    var shifted = fma(x, SIMD[F32, n](LOG2_E), SIMD[F32, n](MAGIC))
    var k = shifted - MAGIC
    var r = fma(k, SIMD[F32, n](-LN2_HIGH), x)
    r = fma(k, SIMD[F32, n](-LN2_LOW), r)
    # e^r = 1 + r + r^2 p(r), p fitted to the least relative error: 4e-9.
    var p = SIMD[F32, n](0.00138144672)
    p = fma(p, r, SIMD[F32, n](0.00836878084))
    p = fma(p, r, SIMD[F32, n](0.0416683927))
    p = fma(p, r, SIMD[F32, n](0.166665196))
    p = fma(p, r, SIMD[F32, n](0.49999994))
    p = fma(p, r * r, r) + 1
    # A product, not a sum of exponents: NaN stays NaN whatever its bits make of 2^k.
    var scale = bitcast[F32, n]((bitcast[DType.int32, n](shifted) << 23) + (127 << 23))
    return x.lt(LEAST).select(SIMD[F32, n](0), p * scale)


@always_inline
def exp[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """e^x to about two ulps, infinity above 87.3 and zero below -87.3."""
    var e = exp_negative(-abs(x))
    return x.gt(0).select(1 / e, e)


@always_inline
def sigmoid[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """1 / (1 + e^-x), of which neither part overflows."""
    var e = exp_negative(-abs(x))
    return x.lt(0).select(e, SIMD[F32, n](1)) / (e + 1)


@always_inline
def silu[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """x sigmoid(x)."""
    var e = exp_negative(-abs(x))
    return x.lt(0).select(x * e, x) / (e + 1)


@always_inline
def softplus[n: Int](x: SIMD[F32, n]) -> SIMD[F32, n]:
    """log(1 + e^x), which is max(x, 0) + log(1 + e^-|x|)."""
    # log(1 + e) = 2 atanh(s / 2) for s = e / (1 + e / 2) <= 2/3: s + s z p(z), z = (s / 2)^2.
    var e = exp_negative(-abs(x))
    var s = e / fma(e, SIMD[F32, n](0.5), SIMD[F32, n](1))
    var z = s * s * 0.25
    var p = SIMD[F32, n](0.140059933)
    p = fma(p, z, SIMD[F32, n](0.140009031))
    p = fma(p, z, SIMD[F32, n](0.200107634))
    p = fma(p, z, SIMD[F32, n](0.333332092))
    return fma(p * z, s, s) + x.gt(0).select(x, SIMD[F32, n](0))


@always_inline
def decay[n: Int](a: SIMD[F32, n], rate: SIMD[F32, n], dt_bias: SIMD[F32, n]) -> SIMD[F32, n]:
    """exp(-rate softplus(a + dt_bias)), where rate is exp(A_log)."""
    return exp_negative(-(rate * softplus(a + dt_bias)))
