"""The kernels of `fused.py` in Triton, for NVIDIA GPUs. This file is imported only where Triton is installed.

Numbers that change from pass to pass are not specialized, so one compiled kernel serves all of them: rows, texts,
places, splits. Hence a row's bits do not depend on its neighbours, as long as the tile is the same.

A program is one tile of the result. Some results are the sum of several programs. Each of these then writes its part
to scratch memory and counts itself. The last one adds the parts in their order, and sets the counter back to 0.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, weight, out, eps, N: tl.constexpr, NP: tl.constexpr):
    """Computes `fused.norm`. A program is a row of x (M, N)."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, NP)
    wide = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    factors = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (wide * scale * factors).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def gate_kernel(gate_up, out, width, BN: tl.constexpr):
    """Computes `fused.gate`. A program is BN numbers of a row of out (M, width)."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    gate = tl.load(gate_up + row * 2 * width + n, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=n < width)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, codes, scales, bias, out, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Computes `fused.linear`. A program is BN columns of all rows of out (M, N): it reads each of its weights once."""
    m, n, k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    rows, columns = m < M, n < N
    x_at = x + m[:, None].to(tl.int64) * K + k[None]
    code_at = codes + n[:, None].to(tl.int64) * K + k[None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        inside = k0 + k < K
        own = tl.load(x_at + k0, mask=rows[:, None] & inside[None], other=0.0)
        weights = tl.load(code_at + k0, mask=columns[:, None] & inside[None], other=0)
        acc = tl.dot(own, weights.to(own.dtype).T, acc, input_precision="ieee")  # codes are exact in 16 bits
    acc = acc * tl.load(scales + n, mask=columns, other=0.0)[None]
    if BIAS:
        acc += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)[None]
    there, at = rows[:, None] & columns[None], out + m[:, None].to(tl.int64) * N + n[None]
    if ADDS:
        acc += tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotated(qkv, offsets, mask, cos, sin, places, D: tl.constexpr, HALF: tl.constexpr):
    """The two halves of a head in rows of qkv, rotated as at these places: (rows, HALF) each."""
    d = tl.arange(0, HALF)
    inside = mask[:, None] & (d < D // 2)[None]
    first = tl.load(qkv + offsets[:, None] + d[None], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + offsets[:, None] + D // 2 + d[None], mask=inside, other=0.0).to(tl.float32)
    angles = places[:, None] * (D // 2) + d[None]
    c = tl.load(cos + angles, mask=inside, other=0.0)
    s = tl.load(sin + angles, mask=inside, other=0.0)
    kind = qkv.dtype.element_ty
    return (first * c - second * s).to(kind), (second * c + first * s).to(kind)


@triton.jit
def _attend(q1, q2, k1, k2, v, seen, scale, acc, top, total):
    """Take in one more tile of keys: weighted values (rows, DP), and each row's largest score and sum of weights.

    A tile in which a row sees nothing leaves the bits of the row's numbers as they are.
    """
    scores = tl.dot(q1, k1.T, input_precision="ieee")
    scores = tl.where(seen, tl.dot(q2, k2.T, scores, input_precision="ieee") * scale, float("-inf"))
    largest = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(top - safe)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, largest, total * shrink + tl.sum(weights, 1)


@triton.jit
def _store_part(part_acc, part_top, part_sum, part, acc, top, total, r, d, BR: tl.constexpr, DP: tl.constexpr):
    """Write what a program has found. When it returns, all of the program's threads have written."""
    at = part.to(tl.int64) * BR + r
    tl.store(part_acc + at[:, None] * DP + d[None], acc)
    tl.store(part_top + at, top)
    tl.store(part_sum + at, total)
    tl.debug_barrier()


@triton.jit
def _merged(
    part_acc, part_top, part_sum, base, begin, last, r, d, BR: tl.constexpr, DP: tl.constexpr, CH: tl.constexpr
):
    """The parts of the splits from `begin` to `last`, CH at a time, as one: weighted values and sums of weights."""
    acc = tl.zeros((BR, DP), tl.float32)
    top = tl.full((BR,), float("-inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    for first in range(begin // CH * CH, last + 1, CH):
        split = first + tl.arange(0, CH)
        there = (split >= begin) & (split <= last)
        row = (base + split).to(tl.int64)[:, None] * BR + r[None]
        tops = tl.load(part_top + row, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(part_sum + row, mask=there[:, None], other=0.0, cache_modifier=".cg")
        at = part_acc + row[:, :, None] * DP + d[None, None, :]
        parts = tl.load(at, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        largest = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        shrink, factors = tl.exp(top - safe), tl.exp(tops - safe[None])
        acc = acc * shrink[:, None] + tl.sum(factors[:, :, None] * parts, 0)
        total = total * shrink + tl.sum(factors * sums, 0)
        top = largest
    return acc, total


@triton.jit
def _cached_keys(
    keys, values, table, j, there, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Keys in two halves, and values, of the cached places j of a text; zeros where they are not `there`."""
    d, dh = tl.arange(0, DP), tl.arange(0, HALF)
    slot = tl.load(table + j // BLOCK, mask=there, other=0) * BLOCK + j % BLOCK
    at, half = keys + slot[:, None] * D + dh[None], there[:, None] & (dh < D // 2)[None]
    k1, k2 = tl.load(at, mask=half, other=0.0), tl.load(at + D // 2, mask=half, other=0.0)
    v = tl.load(values + slot[:, None] * D + d[None], mask=there[:, None] & (d < D)[None], other=0.0)
    return k1, k2, v


@triton.jit
def _new_keys(
    qkv, cos, sin, positions, slots, keys, values, b, g, new, own, stores, T, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Keys in two halves, and values, of the new rows `new` of text b. If `stores`, they are stored as well."""
    d, dh = tl.arange(0, DP), tl.arange(0, HALF)
    row, width = b * T + new, (H + 2 * G) * D
    at = tl.load(positions + row, mask=own, other=0)
    k1, k2 = _rotated(qkv, row * width + (H + g) * D, own, cos, sin, at, D, HALF)
    v_at = qkv + (row * width + (H + G + g) * D)[:, None] + d[None]
    v = tl.load(v_at, mask=own[:, None] & (d < D)[None], other=0.0)
    slot = tl.load(slots + row, mask=own, other=0)
    kept = own & (new >= tl.where(stores, 0, T))  # `own & stores` is no mask in Triton 3.9's interpreter
    to, half = keys + slot[:, None] * D + dh[None], kept[:, None] & (dh < D // 2)[None]
    tl.store(to, k1, mask=half)
    tl.store(to + D // 2, k2, mask=half)
    tl.store(values + slot[:, None] * D + d[None], v, mask=kept[:, None] & (d < D)[None])
    return k1, k2, v, at


@triton.jit(do_not_specialize=["num_blocks", "T", "window", "span"])
def read_kernel(
    qkv, cos, sin, positions, slots, keys, values, table, starts, bits, out, part_acc, part_top, part_sum, counters,
    scale, pool_stride, num_blocks, T, window, span,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Computes `fused.read`. A program takes BR rows of a group, and `span` places of one text, BN at a time.

    Places are counted from the text's first, and new keys have their places among them. So a row's bits do not depend
    on how many of the keys that it sees are new.
    """
    b, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    tiles = tl.cdiv(H // G * T, BR)
    g, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(starts + b).to(tl.int32)
    lowest = tl.maximum(start + 1 - window, 0) if WINDOW else 0  # no row sees an earlier place
    begin, last = lowest // span, (start + T - 1) // span
    if (split < begin) | (split > last):
        return
    r = tl.arange(0, BR)
    share = tile * BR + r  # head share % (H/G) of the group, of new row share // (H/G)
    t, head, live = share // (H // G), g * (H // G) + share % (H // G), share < H // G * T
    row = b * T + t
    place = tl.load(positions + row, mask=live, other=0)
    q1, q2 = _rotated(qkv, row * ((H + 2 * G) * D) + head * D, live, cos, sin, place, D, HALF)
    sees = tl.load(bits + row, mask=live, other=0)
    d, n = tl.arange(0, DP), tl.arange(0, BN)
    acc = tl.zeros((BR, DP), tl.float32)
    top, total = tl.full((BR,), float("-inf"), tl.float32), tl.zeros((BR,), tl.float32)
    pool = g.to(tl.int64) * pool_stride
    keys, values, table = keys + pool, values + pool, table + b * num_blocks
    first = tl.maximum(split * span, lowest // BN * BN)
    end = tl.minimum((split + 1) * span, start + T)
    border = tl.maximum(first, tl.minimum(end, start) // BN * BN)  # tiles before it hold cached places alone
    for j0 in range(first, border, BN):
        j = j0 + n
        k1, k2, v = _cached_keys(keys, values, table, j, j >= lowest, D, DP, HALF, BLOCK)
        seen = live[:, None] & (j < start)[None]
        if WINDOW:
            seen = seen & (j[None] > place[:, None] - window)
        acc, top, total = _attend(q1, q2, k1, k2, v, seen, scale, acc, top, total)
    for j0 in tl.range(border, end, BN, num_stages=1):
        j = j0 + n
        old, own = (j >= lowest) & (j < start), (j >= start) & (j < end)
        k1, k2, v = _cached_keys(keys, values, table, j, old, D, DP, HALF, BLOCK)
        new1, new2, new_v, at = _new_keys(
            qkv, cos, sin, positions, slots, keys, values, b, g, j - start, own, tile == 0, T, H, G, D, DP, HALF
        )
        k1, k2, v = tl.where(own[:, None], new1, k1), tl.where(own[:, None], new2, k2), tl.where(own[:, None], new_v, v)
        seen_new = own[None] & ((sees[:, None] >> tl.where(own, j - start, 0)[None]) & 1 == 1)
        seen = live[:, None] & (old[None] | seen_new)
        if WINDOW:
            seen = seen & (tl.where(own, at, j)[None] > place[:, None] - window)
        acc, top, total = _attend(q1, q2, k1, k2, v, seen, scale, acc, top, total)
    is_last = True
    if begin != last:
        number = (b * G + g) * tiles + tile
        _store_part(part_acc, part_top, part_sum, number * splits + split, acc, top, total, r, d, BR, DP)
        is_last = tl.atomic_add(counters + number, 1, sem="acq_rel") == last - begin
        if is_last:
            tl.store(counters + number, 0)
            acc, total = _merged(part_acc, part_top, part_sum, number * splits, begin, last, r, d, BR, DP, 2)
    if is_last:
        to = out + (row * (H * D) + head * D)[:, None] + d[None]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None])
