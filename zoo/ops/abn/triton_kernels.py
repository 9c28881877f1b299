# mypy: disable-error-code="no-untyped-def, name-defined"
"""The kernels of triton.py as they run on the device, and the two that combine their partial results.

A tensor's memory is seen as (outer, groups, inner): (N, C, S) where it is contiguous, (N S, 1, C) where the channels
are last, S being the number of positions of a channel. Each program works on one group, on COLS inner indices and
``span`` outer indices, in a tile of ROWS by COLS that moves along the outer ones. So a tile holds one channel (the
group) or, with ``CHANNELS_LAST``, COLS channels; except in the last step its lanes are masked by the inner index alone.
``inner`` is passed as ``units`` times the constant UNIT, which tells the compiler by what offsets are divisible:
without it loads are not 128 bits wide. Offsets of rows have 64 bits.

Nothing is added up atomically: each program stores its own result, and a second kernel combines them in a fixed order.
ACC is the accumulation dtype. Names and formulas are those of reference.py.
"""

import triton  # type: ignore
import triton.language as tl  # type: ignore


@triton.jit
def locate(program, outer, groups, units, span, CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr,
           ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Return where a program works, in nine values.

    - channel: the channels of the tile, (1, COLS), or with contiguous memory one number
    - valid: the mask of these channels
    - place: where their results go in a (splits, C) tensor
    - inside: the mask of the tile's columns, (1, COLS)
    - rows: the outer indices of the first step, (ROWS, 1)
    - end: the outer index at which the program stops
    - offsets: the offsets in memory of the first step, (ROWS, COLS)
    - stride: how far the offsets move from one step to the next
    - steps: the number of steps
    """
    inner = units * UNIT
    chunks = tl.cdiv(inner, COLS)
    chunk = program % chunks
    group = program // chunks % groups
    piece = (program // chunks // groups).to(tl.int64)
    cols = (chunk.to(tl.int64) * COLS + tl.arange(0, COLS))[None, :]
    inside = cols < inner
    if CHANNELS_LAST:
        channel = cols
        valid = inside
        place = piece * inner + cols
    else:
        channel = group
        valid = group < groups
        place = (piece * chunks + chunk) * groups + group
    start = piece * span
    rows = (start + tl.arange(0, ROWS))[:, None]
    end = tl.minimum(start + span, outer)
    stride = groups.to(tl.int64) * inner
    offsets = rows * stride + (group.to(tl.int64) * inner + cols)
    return channel, valid, place, inside, rows, end, offsets, stride * ROWS, tl.cdiv(end - start, ROWS).to(tl.int32)


@triton.jit
def scale_of(weight, channel, valid, EPS: tl.constexpr, ACC: tl.constexpr):
    """Return g = |weight| + eps of some channels, 1 without weight."""
    if weight is None:
        scale = tl.full((), 1, ACC)
    else:
        scale = tl.abs(tl.load(weight + channel, mask=valid, other=0).to(ACC)) + EPS
    return scale


@triton.jit
def bias_of(bias, channel, valid, ACC: tl.constexpr):
    """Return the bias of some channels, 0 without one."""
    return tl.full((), 0, ACC) if bias is None else tl.load(bias + channel, mask=valid, other=0).to(ACC)


@triton.jit
def is_lost(scale, shift, ACTIVATION: tl.constexpr, ROUNDING: tl.constexpr):
    """Return whether g is smaller than the error with which z holds y near the bias: x_hat is then taken to be 0."""
    error = tl.abs(shift)
    if ACTIVATION == "elu":  # the inverse of ELU is steeper than 1 below 0
        error = tl.where(shift < 0, tl.exp(-shift - 2 * scale) - 1, error)
    return scale < error * ROUNDING


@triton.jit
def expm1(y):
    """Return exp(y) - 1 for y <= 0 without cancellation: the rounding of exp(y) drops out of Kahan's quotient."""
    power = tl.exp(y)
    usable = (power > 0.25) & (power < 1)
    quotient = (power - 1) * y / tl.log(tl.where(usable, power, 0.5))
    return tl.where(usable, quotient, tl.where(power < 1, power - 1, y))


@triton.jit
def log1p(y):
    """Return log(1 + y) for y <= 0 without cancellation, in the same way as `expm1`."""
    total = 1 + y
    usable = total < 1
    return tl.where(usable, tl.log(total) * y / tl.where(usable, total - 1, 1), y)


@triton.jit
def activate(y, ACTIVATION: tl.constexpr, PARAM: tl.constexpr):
    """Return f(y)."""
    if ACTIVATION == "leaky_relu":
        y = tl.where(y < 0, y * PARAM, y)
    if ACTIVATION == "elu":
        y = tl.where(y < 0, expm1(tl.where(y < 0, y, 0)) * PARAM, y)
    return y


@triton.jit
def invert(z, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr):
    """Return f^-1(z); for a saturated elu the pre-image of the next larger ratio z / alpha, ROUNDING above -1."""
    if ACTIVATION == "leaky_relu":
        z = tl.where(z < 0, z * (1 / PARAM), z)
    if ACTIVATION == "elu":
        ratio = tl.maximum(tl.where(z < 0, z / PARAM, 0), tl.full((), ROUNDING - 1, z.dtype))
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
def fold(tile, CHANNELS_LAST: tl.constexpr):
    """Return a tile's sums per channel: over its rows (shape (1, COLS)), or over all of it (a number)."""
    return tl.sum(tile, 0, keep_dims=True) if CHANNELS_LAST else tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def merge(mean, squares, count, CHANNELS_LAST: tl.constexpr):
    """Return mean, biased variance and number of the values of lanes with ``count`` each (Chan et al., 1979)."""
    total = fold(count, CHANNELS_LAST)
    divisor = tl.maximum(total, 1)
    centre = fold(mean * count, CHANNELS_LAST) / divisor
    distance = mean - centre
    return centre, fold(squares + distance * distance * count, CHANNELS_LAST) / divisor, total


@triton.jit(do_not_specialize=["outer", "groups", "units", "span", "places"])
def statistics(x, partial, outer, groups, units, span, places,
               CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
               ACC: tl.constexpr):  # fmt: skip
    """Write mean, biased variance and number of values of each split, by Welford's update in every lane and a merge.

    ``partial`` is (3, splits, C), where splits C = ``places``.
    """
    _, valid, place, inside, rows, end, offsets, stride, steps = locate(
        tl.program_id(0), outer, groups, units, span, CHANNELS_LAST, UNIT, ROWS, COLS
    )
    mean = tl.zeros((ROWS, COLS), ACC)
    squares = tl.zeros((ROWS, COLS), ACC)
    seen = tl.full((), 0, ACC)
    count = (tl.maximum(end - rows + ROWS - 1, 0) // ROWS).to(ACC) * inside.to(ACC)
    for _ in range(steps):
        mask = (rows < end) & inside
        value = tl.load(x + offsets, mask=mask, other=0).to(ACC)
        # A lane is masked in all steps or in the last one only, so that all lanes that go on have seen as many values.
        seen += 1
        distance = tl.where(mask, value - mean, 0)
        mean += distance * (1 / seen)
        squares += distance * (value - mean)
        rows += ROWS
        offsets += stride
    centre, variance, total = merge(mean, squares, count, CHANNELS_LAST)
    tl.store(partial + place, centre, mask=valid)
    tl.store(partial + places + place, variance, mask=valid)
    tl.store(partial + 2 * places.to(tl.int64) + place, total, mask=valid)


@triton.jit(do_not_specialize=["splits", "channels", "row", "second", "third"])
def combine_statistics(partial, mean, var, count, running_mean, running_var, momentum: "fp64",  # noqa: F821
                       splits, channels, row, second, third, COUNT_STEP: tl.constexpr,
                       ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write mean and biased variance of the union of all splits, and move the running ones towards them.

    The means of a split are at ``partial`` + split ``row``, its variances ``second`` behind them and its numbers of
    values ``third`` behind them: one per channel, or with COUNT_STEP = 0 one for all, as it was gathered from a
    process. ``count``, the number of values of all splits, and the running statistics may be None.
    """
    cols = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    centre = tl.zeros((ROWS, COLS), ACC)
    squares = tl.zeros((ROWS, COLS), ACC)
    seen = tl.zeros((ROWS, COLS), ACC)
    for _ in range(0, splits, ROWS):
        place = rows * row + cols
        mask = (rows < splits) & (cols < channels)
        added = tl.load(partial + third + rows * row + cols * COUNT_STEP, mask=mask, other=0).to(ACC)
        distance = tl.load(partial + place, mask=mask, other=0).to(ACC) - centre
        share = added / tl.maximum(seen + added, 1)
        centre += distance * share
        variance = tl.load(partial + second + place, mask=mask, other=0).to(ACC)
        squares += variance * added + distance * distance * seen * share
        seen += added
        rows += ROWS
    centre, variance, total = merge(centre, squares, seen, True)
    valid = cols < channels
    tl.store(mean + cols, centre.to(mean.dtype.element_ty), mask=valid)
    tl.store(var + cols, variance.to(var.dtype.element_ty), mask=valid)
    if count is not None:
        tl.store(count + cols, total.to(count.dtype.element_ty), mask=cols == 0)
    if running_mean is not None:
        move(running_mean + cols, centre, momentum, valid, ACC)
        move(running_var + cols, variance * (total / tl.maximum(total - 1, 1)), momentum, valid, ACC)


@triton.jit
def move(running, new, momentum, valid, ACC: tl.constexpr):
    """Move running statistics by ``momentum`` towards new ones."""
    old = tl.load(running, mask=valid, other=0).to(ACC)
    tl.store(running, (old + (new - old) * momentum).to(running.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["outer", "groups", "units", "span"])
def apply(x, out, shortcut, mean, var, weight, bias, outer, groups, units, span,
          CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
          EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write z into ``out``, which may be x. Programs start at the end, which the kernel before left in the cache."""
    channel, valid, _, inside, rows, end, offsets, stride, steps = locate(
        tl.num_programs(0) - 1 - tl.program_id(0), outer, groups, units, span, CHANNELS_LAST, UNIT, ROWS, COLS
    )
    centre = tl.load(mean + channel, mask=valid, other=0).to(ACC)
    variance = tl.load(var + channel, mask=valid, other=0).to(ACC)
    slope = scale_of(weight, channel, valid, EPS, ACC) * tl.rsqrt(variance + EPS)
    shift = bias_of(bias, channel, valid, ACC)
    for _ in range(steps):
        mask = (rows < end) & inside
        y = (tl.load(x + offsets, mask=mask, other=0).to(ACC) - centre) * slope + shift
        if shortcut is not None:
            y += tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)
        tl.store(out + offsets, activate(y, ACTIVATION, PARAM).to(out.dtype.element_ty), mask=mask)
        rows += ROWS
        offsets += stride


@triton.jit(do_not_specialize=["outer", "groups", "units", "span", "places"])
def backward_reduce(z, dz, shortcut, weight, bias, partial, outer, groups, units, span, places,
                    CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                    EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr,
                    ACC: tl.constexpr):  # fmt: skip
    """Write sum(dy) and sum(dy x_hat) of each split to ``partial``, (2, splits, C), where splits C = ``places``."""
    channel, valid, place, inside, rows, end, offsets, stride, steps = locate(
        tl.program_id(0), outer, groups, units, span, CHANNELS_LAST, UNIT, ROWS, COLS
    )
    shift = bias_of(bias, channel, valid, ACC)
    sum_dy = tl.zeros((ROWS, COLS), ACC)
    sum_dy_scaled = tl.zeros((ROWS, COLS), ACC)
    for _ in range(steps):
        mask = (rows < end) & inside
        value = tl.load(z + offsets, mask=mask, other=0).to(ACC)
        gradient = tl.load(dz + offsets, mask=mask, other=0).to(ACC)
        rest = shift
        if shortcut is not None:
            rest += tl.load(shortcut + offsets, mask=mask, other=0).to(ACC)
        dy = differentiate(value, gradient, ACTIVATION, PARAM)
        sum_dy += dy
        # g dy x_hat = dy y - dy (bias + shortcut), subtracted per value, as the sums of the two may nearly cancel.
        if ACTIVATION == "elu":
            sum_dy_scaled += dy * (invert(value, ACTIVATION, PARAM, ROUNDING) - rest)
        else:
            sum_dy_scaled += gradient * value - dy * rest  # dy y = dz z needs no inversion
        rows += ROWS
        offsets += stride
    scale = scale_of(weight, channel, valid, EPS, ACC)
    divisor = tl.where(is_lost(scale, shift, ACTIVATION, ROUNDING), float("inf"), scale)
    tl.store(partial + place, fold(sum_dy, CHANNELS_LAST), mask=valid)
    tl.store(partial + places + place, fold(sum_dy_scaled, CHANNELS_LAST) / divisor, mask=valid)


@triton.jit(do_not_specialize=["splits", "channels", "divisor"])
def combine_sums(partial, weight, means, dweight, dbias, splits, channels, divisor,
                 ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Write the two sums over all splits, over ``divisor``, into the (2, C) ``means``, and the parameters' gradients.

    Those of weight and bias are sign(weight) sum(dy x_hat), the sign of 0 being +1, and sum(dy); either may be None.
    """
    cols = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    first = tl.zeros((ROWS, COLS), ACC)
    second = tl.zeros((ROWS, COLS), ACC)
    places = splits.to(tl.int64) * channels
    for _ in range(0, splits, ROWS):
        place = rows * channels + cols
        mask = (rows < splits) & (cols < channels)
        first += tl.load(partial + place, mask=mask, other=0)
        second += tl.load(partial + places + place, mask=mask, other=0)
        rows += ROWS
    valid = cols < channels
    sum_dy = fold(first, True)
    sum_dy_xhat = fold(second, True)
    number = divisor.to(ACC)
    tl.store(means + cols, sum_dy / number, mask=valid)
    tl.store(means + channels + cols, sum_dy_xhat / number, mask=valid)
    if dweight is not None:
        negative = tl.load(weight + cols, mask=valid, other=0).to(ACC) < 0
        tl.store(dweight + cols, tl.where(negative, -sum_dy_xhat, sum_dy_xhat).to(dweight.dtype.element_ty), mask=valid)
    if dbias is not None:
        tl.store(dbias + cols, sum_dy.to(dbias.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["outer", "groups", "units", "span"])
def backward_apply(z, dz, shortcut, var, weight, bias, mean_dy, mean_dy_xhat, dx, dshortcut,
                   outer, groups, units, span,
                   CHANNELS_LAST: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   EPS: tl.constexpr, ACTIVATION: tl.constexpr, PARAM: tl.constexpr, ROUNDING: tl.constexpr,
                   ACC: tl.constexpr):  # fmt: skip
    """Write dx and, with a shortcut, its gradient, starting at the end as in `apply`."""
    channel, valid, _, inside, rows, end, offsets, stride, steps = locate(
        tl.num_programs(0) - 1 - tl.program_id(0), outer, groups, units, span, CHANNELS_LAST, UNIT, ROWS, COLS
    )
    inverse_std = tl.rsqrt(tl.load(var + channel, mask=valid, other=0).to(ACC) + EPS)
    scale = scale_of(weight, channel, valid, EPS, ACC)
    slope = scale * inverse_std
    shift = bias_of(bias, channel, valid, ACC)
    if mean_dy is not None:
        constant = -slope * tl.load(mean_dy + channel, mask=valid, other=0).to(ACC)
        factor = -inverse_std * tl.load(mean_dy_xhat + channel, mask=valid, other=0).to(ACC)  # of g x_hat
        factor = tl.where(is_lost(scale, shift, ACTIVATION, ROUNDING), factor * 0, factor)  # NaN stays NaN
    for _ in range(steps):
        mask = (rows < end) & inside
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
        rows += ROWS
        offsets += stride
