# mypy: disable-error-code="no-untyped-def, name-defined"
"""The device code of triton.py: the kernels, and two kernels that combine their partial results.

A tensor's memory is indexed as (outer, groups, inner). A tile of ROWS by COLS moves along the outer index.

| memory | outer, groups, inner | PERIOD | a tile contains |
|---|---|---|---|
| channels last | N S, 1, C | 1 | COLS channels |
| contiguous | N, C, S | 0 | one channel, the group |
| contiguous, S not divisible by a vector | N, 1, C S | S | the channels of COLS adjacent columns, S columns each |

S is the number of positions of a channel. The tiles of one group and one set of COLS columns are a strip. A program
processes every ``pieces``-th tile of a strip, so all programs together sweep memory from start to end. Elementwise
kernels sweep backwards, starting with what is still in the cache.

``inner`` is passed as ``units`` times the constant UNIT. The constant tells the compiler the divisibility of offsets;
without it loads would not be 128 bits wide. Offsets have 64 bits.

There are no atomics: each program stores its own result, per column if PERIOD is not 0, and a second kernel combines
them in a fixed order. ACC is the accumulation dtype. Names and formulas follow reference.py.
"""

import triton  # type: ignore
import triton.language as tl  # type: ignore

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def locate(program, pieces, outer, groups, units, PERIOD: tl.constexpr, UNIT: tl.constexpr,
           ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Return the tile of this program: channels, masks and offsets, as nine values.

    - channel: the channels of the tile, (1, COLS), or with PERIOD = 0 one number
    - valid: the mask of these channels
    - place: the offsets of their results in a (splits, groups) or (splits, inner) tensor
    - inside: the mask of the tile's columns, (1, COLS)
    - rows: the outer indices of the first tile, (ROWS, 1)
    - step: how far the rows move from one tile to the next
    - offsets: the offsets in memory of the first tile, (ROWS, COLS)
    - stride: how far the offsets move from one tile to the next
    - steps: the number of tiles; only the last one may have missing rows
    """
    inner = units * UNIT
    chunks = tl.cdiv(inner, COLS)
    chunk = program % chunks
    group = program // chunks % groups
    piece = program // chunks // groups
    first = chunk.to(tl.int64) * COLS
    cols = (first + tl.arange(0, COLS))[None, :]
    inside = cols < inner
    if PERIOD == 0:
        channel = group
        valid = group < groups
        place = (piece.to(tl.int64) * chunks + chunk) * groups + group
    else:
        # 64-bit divisions are slow; only one is needed.
        channel = first // PERIOD + (((first % PERIOD).to(tl.int32) + tl.arange(0, COLS)) // PERIOD)[None, :]
        valid = inside
        place = piece.to(tl.int64) * inner + cols
    rows = (piece.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    step = pieces.to(tl.int64) * ROWS
    stride = groups.to(tl.int64) * inner
    offsets = rows * stride + (group.to(tl.int64) * inner + cols)
    tiles = (outer.to(tl.int64) + ROWS - 1) // ROWS
    steps = ((tiles - piece + pieces - 1) // pieces).to(tl.int32)
    return channel, valid, place, inside, rows, step, offsets, stride * step, steps


@triton.jit
def locate_last(pieces, outer, groups, units, PERIOD: tl.constexpr, UNIT: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Return the values of `locate` for the reverse order: last program first, and from its last tile to its first."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    channel, valid, place, inside, rows, step, offsets, stride, steps = locate(
        program, pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    back = steps.to(tl.int64) - 1
    return channel, valid, place, inside, rows + back * step, -step, offsets + back * stride, -stride, steps


@triton.jit
def scale_of(weight, channel, valid, EPS: tl.constexpr, ACC: tl.constexpr):
    """Return g = |weight| + eps per channel, 1 without weight."""
    if weight is None:
        scale = tl.full((), 1, ACC)
    else:
        scale = tl.abs(tl.load(weight + channel, mask=valid, other=0).to(ACC)) + EPS
    return scale


@triton.jit
def bias_of(bias, channel, valid, ACC: tl.constexpr):
    """Return the bias per channel, 0 without bias."""
    return tl.full((), 0, ACC) if bias is None else tl.load(bias + channel, mask=valid, other=0).to(ACC)


@triton.jit
def is_unrecoverable(scale, shift, ACTIVATION: tl.constexpr, ROUNDING: tl.constexpr):
    """Return whether g is smaller than the rounding error of y near the bias; x_hat is then set to 0."""
    error = tl.abs(shift)
    if ACTIVATION == "elu":  # the inverse of ELU is steeper than 1 below 0
        error = tl.where(shift < 0, tl.exp(-shift - 2 * scale) - 1, error)
    return scale < error * ROUNDING


@triton.jit
def expm1(y):
    """Return exp(y) - 1 for y <= 0 without cancellation; undefined for y > 0.

    In float32 it uses a polynomial near 0 and otherwise the approximate exp(y) - 1, both with a relative error below
    1e-6. In float64 it uses Kahan's quotient, in which the rounding error of exp(y) cancels.
    """
    power = tl.exp(y)
    if y.dtype == tl.float64:
        usable = (power > 0.25) & (power < 1)
        quotient = (power - 1) * y / tl.log(tl.where(usable, power, 0.5))
        result = tl.where(usable, quotient, tl.where(power < 1, power - 1, y))
    else:
        near = 0.0072049615 * y + 0.041327447
        near = near * y + 0.16662432
        near = near * y + 0.49999812
        result = tl.where(y > -0.35, near * (y * y) + y, power - 1)
    return result


@triton.jit
def log1p(y):
    """Return log(1 + y) for -1 < y <= 0 without cancellation, as in `expm1`; undefined for y > 0."""
    total = 1 + y
    if y.dtype == tl.float64:
        usable = total < 1
        result = tl.where(usable, tl.log(total) * y / tl.where(usable, total - 1, 1), y)
    else:
        near = 0.31409043 * y - 0.22801182
        near = near * y + 0.33498055
        near = near * y - 0.49995765
        result = tl.where(y > -0.2, near * (y * y) + y, log2(total) * 0.6931471805599453)
    return result


@triton.jit
def log2(x):
    """Return the base-2 logarithm of float32 numbers, with an absolute error of 2^-22 between 0.5 and 2."""
    if INTERPRETED:
        result = tl.log2(x)
    else:  # tl.log2 is accurate to 1 ulp, which takes more instructions than the rest of the loop
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def activate(y, ACTIVATION: tl.constexpr, PARAM: tl.constexpr):
    """Return f(y)."""
    if ACTIVATION == "leaky_relu":
        y = tl.where(y < 0, y * PARAM, y)
    if ACTIVATION == "elu":
        y = tl.where(y < 0, expm1(y) * PARAM, y)
    return y


@triton.jit
def invert(z, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr):
    """Return f^-1(z). For a saturated elu, the pre-image of the next larger ratio z / alpha, -1 + ROUNDING."""
    if ACTIVATION == "leaky_relu":
        z = tl.where(z < 0, z * (1 / PARAM), z)
    if ACTIVATION == "elu":
        ratio = tl.maximum(z * (1 / PARAM), tl.full((), ROUNDING - 1, z.dtype))
        z = tl.where(z < 0, log1p(ratio), z)
    return z


@triton.jit
def differentiate(z, dz, ACTIVATION: tl.constexpr, PARAM: tl.constexpr):
    """Return dy = dz f'(y) as a function of z = f(y)."""
    if ACTIVATION == "leaky_relu":
        dz = tl.where(z < 0, dz * PARAM, dz)
    if ACTIVATION == "elu":
        dz = tl.where(z < 0, dz * (z + PARAM), dz)
    return dz


@triton.jit
def fold(tile, PERIOD: tl.constexpr):
    """Return the sums of a tile: per column, (1, COLS), or if PERIOD is 0 over the whole tile (a scalar)."""
    return tl.sum(tl.sum(tile, 1), 0) if PERIOD == 0 else tl.sum(tile, 0, keep_dims=True)


@triton.jit
def merge(mean, squares, count, PERIOD: tl.constexpr):
    """Return mean, biased variance and number of values over lanes with ``count`` values each (Chan et al., 1979)."""
    total = fold(count, PERIOD)
    divisor = tl.maximum(total, 1)
    center = fold(mean * count, PERIOD) / divisor
    distance = mean - center
    return center, fold(squares + distance * distance * count, PERIOD) / divisor, total


@triton.jit(do_not_specialize=["pieces", "outer", "groups", "units", "places"])
def statistics(x, partial, pieces, outer, groups, units, places: "i64",  # noqa: F821
               PERIOD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
               ACC: tl.constexpr):  # fmt: skip
    """Write mean, biased variance and number of values of each split: Welford's update per lane, then a merge.

    ``partial`` is (3, splits, columns), where splits times columns = ``places``.
    """
    _, valid, place, inside, rows, step, offsets, stride, steps = locate(
        tl.program_id(0), pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    mean = tl.zeros((ROWS, COLS), ACC)
    squares = tl.zeros((ROWS, COLS), ACC)
    seen = tl.full((), 0, ACC)
    # Lanes are masked in all steps or only in the last step, so all active lanes have the same number of values.
    last = rows + (steps - 1) * step
    count = tl.where(last < outer, steps, steps - 1).to(ACC) * inside.to(ACC)
    for _ in range(steps):
        mask = (rows < outer) & inside
        value = tl.load(x + offsets, mask=mask, other=0).to(ACC)
        seen += 1
        distance = tl.where(mask, value - mean, 0)
        mean += distance * (1 / seen)
        squares += distance * (value - mean)
        rows += step
        offsets += stride
    center, variance, total = merge(mean, squares, count, PERIOD)
    tl.store(partial + place, center, mask=valid)
    tl.store(partial + places + place, variance, mask=valid)
    tl.store(partial + 2 * places + place, total, mask=valid)


@triton.jit(do_not_specialize=["splits", "channels", "row", "second", "third"])
def combine_statistics(partial, mean, var, count, running_mean, running_var, momentum: "fp64",  # noqa: F821
                       splits, channels, row, second, third, OWN_COUNTS: tl.constexpr,
                       PERIOD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write mean and biased variance over all splits, and update the running statistics.

    The means of a split are at ``partial + split * row``, PERIOD per channel; its variances follow at offset
    ``second``, and its numbers of values at offset ``third``. There is one number per mean, or without OWN_COUNTS one
    per split, as gathered from a process. ``count`` (number of values of all splits) and the running statistics may be
    None.
    """
    cols = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    center = tl.zeros((ROWS, COLS), ACC)
    squares = tl.zeros((ROWS, COLS), ACC)
    seen = tl.zeros((ROWS, COLS), ACC)
    for _ in range(0, splits * PERIOD, ROWS):
        start = rows // PERIOD * row
        place = start + (cols.to(tl.int64) * PERIOD + rows % PERIOD)
        mask = (rows < splits * PERIOD) & (cols < channels)
        added = tl.load(partial + third + (place if OWN_COUNTS else start + cols * 0), mask=mask, other=0).to(ACC)
        distance = tl.load(partial + place, mask=mask, other=0).to(ACC) - center
        share = added / tl.maximum(seen + added, 1)
        center += distance * share
        variance = tl.load(partial + second + place, mask=mask, other=0).to(ACC)
        squares += variance * added + distance * distance * seen * share
        seen += added
        rows += ROWS
    center, variance, total = merge(center, squares, seen, 1)
    valid = cols < channels
    tl.store(mean + cols, center.to(mean.dtype.element_ty), mask=valid)
    tl.store(var + cols, variance.to(var.dtype.element_ty), mask=valid)
    if count is not None:
        tl.store(count + cols, total.to(count.dtype.element_ty), mask=cols == 0)
    if running_mean is not None:
        move(running_mean + cols, center, momentum, valid, ACC)
        move(running_var + cols, variance * (total / tl.maximum(total - 1, 1)), momentum, valid, ACC)


@triton.jit
def move(running, new, momentum, valid, ACC: tl.constexpr):
    """Update running statistics: r becomes r + momentum (new - r)."""
    old = tl.load(running, mask=valid, other=0).to(ACC)
    tl.store(running, (old + (new - old) * momentum).to(running.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["pieces", "outer", "groups", "units"])
def apply(x, out, shortcut, mean, var, weight, bias, pieces, outer, groups, units,
          PERIOD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
          EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write z to ``out``, which may be x. Starts at the end, because the previous kernel left it in the cache."""
    channel, valid, _, inside, rows, step, offsets, stride, steps = locate_last(
        pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    center = tl.load(mean + channel, mask=valid, other=0).to(ACC)
    variance = tl.load(var + channel, mask=valid, other=0).to(ACC)
    slope = scale_of(weight, channel, valid, EPS, ACC) * tl.rsqrt(variance + EPS)
    shift = bias_of(bias, channel, valid, ACC)
    for _ in range(steps):
        mask = (rows < outer) & inside
        y = (tl.load(x + offsets, mask=mask, other=0).to(ACC) - center) * slope + shift
        if shortcut is not None:
            y += tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)
        tl.store(out + offsets, activate(y, ACTIVATION, PARAM).to(out.dtype.element_ty), mask=mask)
        rows += step
        offsets += stride


@triton.jit(do_not_specialize=["pieces", "outer", "groups", "units"])
def normalize(x, out, shortcut, mean, invstd, weight, bias, pieces, outer, groups, units,
              PERIOD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
              ORDER: tl.constexpr, RECTIFIED: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write a batch norm with these statistics, plus the shortcut, followed by ReLU.

    The result has the bits of the separate operations, each rounded to the dtype of ``out``. ORDER is the order in
    which a batch norm multiplies and adds, see `zoo.ops.abn.triton.ORDERS`; only the fused multiply-add that it names
    is fused.
    """
    channel, valid, _, inside, rows, step, offsets, stride, steps = locate_last(
        pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    center = tl.load(mean + channel, mask=valid, other=0).to(ACC)
    slope = tl.load(invstd + channel, mask=valid, other=0).to(ACC)
    shift = bias_of(bias, channel, valid, ACC)
    factor = tl.full((), 1, ACC) if weight is None else tl.load(weight + channel, mask=valid, other=0).to(ACC)
    if ORDER != "weight first":
        slope = slope * factor
        factor = tl.full((), 1, ACC)
    if ORDER == "line":
        shift = shift - center * slope
        center = center * 0
    for _ in range(steps):
        mask = (rows < outer) & inside
        y = tl.fma((tl.load(x + offsets, mask=mask, other=0).to(ACC) - center) * factor, slope, shift)
        y = y.to(out.dtype.element_ty)
        if shortcut is not None:
            y = (y.to(ACC) + tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)).to(out.dtype.element_ty)
        if RECTIFIED:
            y = tl.maximum(y.to(ACC), 0.0, propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty)
        tl.store(out + offsets, y, mask=mask)
        rows += step
        offsets += stride


@triton.jit(do_not_specialize=["pieces", "outer", "groups", "units", "places"])
def backward_reduce(z, dz, shortcut, weight, bias, partial, pieces, outer, groups, units, places: "i64",  # noqa: F821
                    PERIOD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                    EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr,
                    ACC: tl.constexpr):  # fmt: skip
    """Write sum(dy) and sum(dy x_hat) of each split to ``partial``, (2, splits, columns), as `statistics` does."""
    channel, valid, place, inside, rows, step, offsets, stride, steps = locate(
        tl.program_id(0), pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    shift = bias_of(bias, channel, valid, ACC)
    sum_dy = tl.zeros((ROWS, COLS), ACC)
    sum_dy_scaled = tl.zeros((ROWS, COLS), ACC)
    for _ in range(steps):
        mask = (rows < outer) & inside
        value = tl.load(z + offsets, mask=mask, other=0).to(ACC)
        gradient = tl.load(dz + offsets, mask=mask, other=0).to(ACC)
        rest = shift
        if shortcut is not None:
            rest += tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)
        dy = differentiate(value, gradient, ACTIVATION, PARAM)
        sum_dy += dy
        # g dy x_hat = dy y - dy (bias + shortcut), subtracted per value because the two sums may nearly cancel.
        if ACTIVATION == "elu":
            sum_dy_scaled += dy * (invert(value, ACTIVATION, PARAM, ROUNDING) - rest)
        else:
            sum_dy_scaled += gradient * value - dy * rest  # dy y = dz z needs no inversion
        rows += step
        offsets += stride
    scale = scale_of(weight, channel, valid, EPS, ACC)
    divisor = tl.where(is_unrecoverable(scale, shift, ACTIVATION, ROUNDING), float("inf"), scale)
    tl.store(partial + place, fold(sum_dy, PERIOD), mask=valid)
    tl.store(partial + places + place, fold(sum_dy_scaled, PERIOD) / divisor, mask=valid)


@triton.jit(do_not_specialize=["splits", "channels", "divisor"])
def combine_sums(partial, weight, means, dweight, dbias, splits, channels, divisor,
                 PERIOD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write the two sums over all splits, divided by ``divisor``, to the (2, C) ``means``, and the parameter gradients.

    ``partial`` is (2, splits, C PERIOD). The gradients are dweight = sign(weight) sum(dy x_hat), where the sign of 0 is
    +1, and dbias = sum(dy). Either may be None.
    """
    cols = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    first = tl.zeros((ROWS, COLS), ACC)
    second = tl.zeros((ROWS, COLS), ACC)
    columns = channels.to(tl.int64) * PERIOD
    places = splits * columns
    for _ in range(0, splits * PERIOD, ROWS):
        place = rows // PERIOD * columns + (cols.to(tl.int64) * PERIOD + rows % PERIOD)
        mask = (rows < splits * PERIOD) & (cols < channels)
        first += tl.load(partial + place, mask=mask, other=0)
        second += tl.load(partial + places + place, mask=mask, other=0)
        rows += ROWS
    valid = cols < channels
    sum_dy = fold(first, 1)
    sum_dy_xhat = fold(second, 1)
    number = divisor.to(ACC)
    tl.store(means + cols, sum_dy / number, mask=valid)
    tl.store(means + channels + cols, sum_dy_xhat / number, mask=valid)
    if dweight is not None:
        negative = tl.load(weight + cols, mask=valid, other=0).to(ACC) < 0
        tl.store(dweight + cols, tl.where(negative, -sum_dy_xhat, sum_dy_xhat).to(dweight.dtype.element_ty), mask=valid)
    if dbias is not None:
        tl.store(dbias + cols, sum_dy.to(dbias.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["pieces", "outer", "groups", "units"])
def backward_apply(z, dz, shortcut, var, weight, bias, mean_dy, mean_dy_xhat, dx, dshortcut,
                   pieces, outer, groups, units,
                   PERIOD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr,
                   ACC: tl.constexpr):  # fmt: skip
    """Write dx and, with a shortcut, its gradient. Starts at the end, as `apply` does."""
    channel, valid, _, inside, rows, step, offsets, stride, steps = locate_last(
        pieces, outer, groups, units, PERIOD, UNIT, ROWS, COLS
    )
    inverse_std = tl.rsqrt(tl.load(var + channel, mask=valid, other=0).to(ACC) + EPS)
    scale = scale_of(weight, channel, valid, EPS, ACC)
    slope = scale * inverse_std
    shift = bias_of(bias, channel, valid, ACC)
    if mean_dy is not None:
        constant = -slope * tl.load(mean_dy + channel, mask=valid, other=0).to(ACC)
        factor = -inverse_std * tl.load(mean_dy_xhat + channel, mask=valid, other=0).to(ACC)  # factor of g x_hat
        factor = tl.where(is_unrecoverable(scale, shift, ACTIVATION, ROUNDING), factor * 0, factor)  # NaN stays NaN
    for _ in range(steps):
        mask = (rows < outer) & inside
        value = tl.load(z + offsets, mask=mask, other=0).to(ACC)
        dy = differentiate(value, tl.load(dz + offsets, mask=mask, other=0).to(ACC), ACTIVATION, PARAM)
        gradient = dy * slope
        if mean_dy is not None:
            rest = shift
            if shortcut is not None:
                rest += tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)
            gradient += (invert(value, ACTIVATION, PARAM, ROUNDING) - rest) * factor + constant
        tl.store(dx + offsets, gradient.to(dx.dtype.element_ty), mask=mask)
        if dshortcut is not None:
            tl.store(dshortcut + offsets, dy.to(dshortcut.dtype.element_ty), mask=mask)
        rows += step
        offsets += stride
