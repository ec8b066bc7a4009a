"""Kernels of `modulated_norm`: forward, the means of wide rows, backward, and the sums over the tokens of a sample."""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _sum_with_residual(
    x_ptr, residual_ptr, gate_ptr, s_dtype: tl.constexpr, cols, mask, HAS_RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr
):
    """Tile of s, rounded as it is stored; the pointers are to rows."""
    s = tl.load(x_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        if HAS_GATE:
            s *= tl.load(gate_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        s += tl.load(residual_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        s = s.to(s_dtype).to(tl.float32)
    return s


@triton.jit
def _modulated(n, w_ptr, scale_ptr, shift_ptr, cols, mask, num_cols, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr):
    if HAS_WEIGHT:
        n *= tl.load(w_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    n *= 1.0 + tl.load(scale_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        n += tl.load(shift_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return n


@triton.jit
def _modulated_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    gate_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    gate_stride,
    scale_stride,
    shift_stride,
    num_rows,
    num_cols,
    rows_per_sample,
    eps,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows; a row wider than BLOCK_N is read twice, the second time from cache."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    # Rows beyond the last have no sample; they are masked, but not to compute an address far outside.
    samples = tl.where(row_mask, rows, 0) // rows_per_sample
    x_rows = x_ptr + rows[:, None] * x_stride
    residual_rows = x_rows
    gate_rows = x_rows
    shift_rows = x_rows
    if HAS_RESIDUAL:
        residual_rows = residual_ptr + rows[:, None] * residual_stride
    if HAS_GATE:
        gate_rows = gate_ptr + samples[:, None] * gate_stride
    if HAS_SHIFT:
        shift_rows = shift_ptr + samples[:, None] * shift_stride
    scale_rows = scale_ptr + samples[:, None] * scale_stride
    y_rows = y_ptr + rows[:, None] * num_cols
    s_rows = s_ptr + rows[:, None] * num_cols
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)

    if ONE_BLOCK:
        mask = row_mask[:, None] & (cols < num_cols)[None, :]
        s = _sum_with_residual(x_rows, residual_rows, gate_rows, s_dtype, cols, mask, HAS_RESIDUAL, HAS_GATE)
        if HAS_RESIDUAL:
            tl.store(s_rows + cols[None, :], s, mask=mask)
        if CENTRED:
            mean = tl.sum(s, axis=1) / num_cols
            tl.store(mean_ptr + rows, mean, mask=row_mask)
            # Lanes beyond the row hold -mean after centring and must not count.
            s = tl.where(mask, s - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(s * s, axis=1) / num_cols + eps)
        n = s * rstd[:, None]
        y = _modulated(n, w_ptr, scale_rows, shift_rows, cols, mask, num_cols, HAS_WEIGHT, HAS_SHIFT)
        tl.store(y_rows + cols[None, :], y, mask=mask)
    else:
        mean = tl.zeros([BLOCK_M], dtype=tl.float32)
        squares = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _sum_with_residual(x_rows, residual_rows, gate_rows, s_dtype, c, mask, HAS_RESIDUAL, HAS_GATE)
            if HAS_RESIDUAL:
                tl.store(s_rows + c[None, :], s, mask=mask)
            if CENTRED:
                count = tl.minimum(num_cols - start, BLOCK_N)
                block_mean = tl.sum(s, axis=1) / count
                s = tl.where(mask, s - block_mean[:, None], 0.0)
                # Joins two sets of samples without the cancellation of mean(s^2) - mean(s)^2.
                delta = block_mean - mean
                share = count / (start + count)
                mean += delta * share
                squares += delta * delta * (start * share)
            squares += tl.sum(s * s, axis=1)
        rstd = tl.rsqrt(squares / num_cols + eps)
        if CENTRED:
            tl.store(mean_ptr + rows, mean, mask=row_mask)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _sum_with_residual(x_rows, residual_rows, gate_rows, s_dtype, c, mask, HAS_RESIDUAL, HAS_GATE)
            n = (s - mean[:, None]) * rstd[:, None]
            y = _modulated(n, w_ptr, scale_rows, shift_rows, c, mask, num_cols, HAS_WEIGHT, HAS_SHIFT)
            tl.store(y_rows + c[None, :], y, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


@triton.jit
def _modulated_norm_bwd_means_kernel(
    s_ptr,
    w_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    mean_g_ptr,
    mean_gn_ptr,
    s_stride,
    scale_stride,
    dy_stride,
    num_cols,
    rows_per_sample,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row, for rows too wide for registers: the means of g and g * n."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    dy_ptr += row * dy_stride
    scale_ptr += (row // rows_per_sample) * scale_stride
    rstd = tl.load(rstd_ptr + row)
    sum_g = tl.zeros([BLOCK_N], dtype=tl.float32)
    sum_gn = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        g *= 1.0 + tl.load(scale_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        n = tl.load(s_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            n -= tl.load(mean_ptr + row)
        sum_g += g
        sum_gn += tl.where(mask, g * n * rstd, 0.0)
    if CENTRED:
        tl.store(mean_g_ptr + row, tl.sum(sum_g, axis=0) / num_cols)
    tl.store(mean_gn_ptr + row, tl.sum(sum_gn, axis=0) / num_cols)


@triton.jit
def _modulated_norm_bwd_kernel(
    s_ptr,
    x_ptr,
    gate_ptr,
    w_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    mean_g_ptr,
    mean_gn_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    dresidual_ptr,
    dgate_ptr,
    dscale_ptr,
    dshift_ptr,
    dw_ptr,
    s_stride,
    x_stride,
    gate_stride,
    scale_stride,
    dy_stride,
    ds_stride,
    rows_per_sample,
    num_cols,
    CENTRED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GIVEN_MEANS: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DRESIDUAL: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DSCALE: tl.constexpr,
    NEEDS_DSHIFT: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (b, p, c) takes row tiles p, p + P, ... of sample b, column block c, and leaves fp32 partial rows (b, p).

    The partial row of dscale is that of dy * n, from which dweight follows too. BY_TOKEN has one sample of all rows,
    writes the gradients of the modulation as they are and leaves partial rows of dweight.
    """
    sample = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    if not BY_TOKEN:
        factor = 1.0 + tl.load(scale_ptr + sample * scale_stride + cols, mask=col_mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            factor *= w
        if HAS_GATE:
            gate = tl.load(gate_ptr + sample * gate_stride + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    sum_dyn = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sum_dy = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sum_dgate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    num_tiles = tl.cdiv(rows_per_sample, BLOCK_M)
    for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=STAGES):
        tokens = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = tokens < rows_per_sample
        rows = sample * rows_per_sample + tokens
        mask = row_mask[:, None] & col_mask[None, :]
        out = rows[:, None] * num_cols + cols[None, :]
        n = tl.load(s_ptr + rows[:, None] * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        if CENTRED:
            mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
            n = tl.where(mask, n - mean[:, None], 0.0)
        n *= rstd[:, None]
        dyn = dy * n
        if BY_TOKEN:
            if NEEDS_DSHIFT:
                tl.store(dshift_ptr + out, dy, mask=mask)
            if NEEDS_DSCALE:
                dscale = dyn
                if HAS_WEIGHT:
                    dscale = dyn * w[None, :]
                tl.store(dscale_ptr + out, dscale, mask=mask)
            scales = scale_ptr + rows[:, None] * scale_stride + cols[None, :]
            factors = 1.0 + tl.load(scales, mask=mask, other=0.0).to(tl.float32)
            if NEEDS_DW:
                sum_dyn += dyn * factors
            if HAS_WEIGHT:
                factors *= w[None, :]
        else:
            factors = factor[None, :]
            if NEEDS_DSCALE or NEEDS_DW:
                sum_dyn += dyn
            if NEEDS_DSHIFT:
                sum_dy += dy
        if NEEDS_DX or NEEDS_DRESIDUAL or NEEDS_DGATE:
            g = dy * factors
            if GIVEN_MEANS:
                mean_gn = tl.load(mean_gn_ptr + rows, mask=row_mask, other=0.0)
            else:
                mean_gn = tl.sum(g * n, axis=1) / num_cols
            ds = g - n * mean_gn[:, None]
            if CENTRED:
                if GIVEN_MEANS:
                    mean_g = tl.load(mean_g_ptr + rows, mask=row_mask, other=0.0)
                else:
                    mean_g = tl.sum(g, axis=1) / num_cols
                ds -= mean_g[:, None]
            ds *= rstd[:, None]
            if HAS_DS:
                upstream = ds_ptr + rows[:, None] * ds_stride + cols[None, :]
                ds += tl.load(upstream, mask=mask, other=0.0).to(tl.float32)
            if NEEDS_DRESIDUAL:
                tl.store(dresidual_ptr + out, ds, mask=mask)
            if NEEDS_DGATE:
                x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                if BY_TOKEN:
                    tl.store(dgate_ptr + out, ds * x, mask=mask)
                else:
                    # Lanes beyond the row hold -mean(g) in ds, and 0 in x.
                    sum_dgate += ds * x
            if NEEDS_DX:
                if HAS_GATE:
                    if BY_TOKEN:
                        gates = gate_ptr + rows[:, None] * gate_stride + cols[None, :]
                        gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
                    ds *= gate
                tl.store(dx_ptr + out, ds, mask=mask)
    partial = (sample * tl.num_programs(1) + tl.program_id(1)) * num_cols + cols
    if BY_TOKEN:
        if NEEDS_DW:
            tl.store(dw_ptr + partial, tl.sum(sum_dyn, axis=0), mask=col_mask)
    else:
        if NEEDS_DSCALE or NEEDS_DW:
            tl.store(dscale_ptr + partial, tl.sum(sum_dyn, axis=0), mask=col_mask)
        if NEEDS_DSHIFT:
            tl.store(dshift_ptr + partial, tl.sum(sum_dy, axis=0), mask=col_mask)
        if NEEDS_DGATE:
            tl.store(dgate_ptr + partial, tl.sum(sum_dgate, axis=0), mask=col_mask)


@triton.jit
def _sum_splits(partial_ptr, cols, num_splits, num_cols, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_splits, BLOCK_P):
        splits = start + tl.arange(0, BLOCK_P)
        mask = (splits < num_splits)[:, None] & (cols < num_cols)[None, :]
        total += tl.load(partial_ptr + splits[:, None] * num_cols + cols[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _modulated_norm_bwd_sums_kernel(
    dyn_ptr,
    dy_ptr,
    dgate_partial_ptr,
    w_ptr,
    scale_ptr,
    dgate_ptr,
    dscale_ptr,
    dshift_ptr,
    dw_ptr,
    scale_stride,
    num_splits,
    num_cols,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DSCALE: tl.constexpr,
    NEEDS_DSHIFT: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (c, b) sums the partial rows of sample b; the sum for dweight stays a row for each sample."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < num_cols
    sample = tl.program_id(1).to(tl.int64)
    first = sample * num_splits * num_cols
    out = sample * num_cols + cols
    if NEEDS_DGATE:
        dgate = _sum_splits(dgate_partial_ptr + first, cols, num_splits, num_cols, BLOCK_P, BLOCK_N)
        tl.store(dgate_ptr + out, dgate, mask=mask)
    if NEEDS_DSHIFT:
        dshift = _sum_splits(dy_ptr + first, cols, num_splits, num_cols, BLOCK_P, BLOCK_N)
        tl.store(dshift_ptr + out, dshift, mask=mask)
    if NEEDS_DSCALE or NEEDS_DW:
        dyn = _sum_splits(dyn_ptr + first, cols, num_splits, num_cols, BLOCK_P, BLOCK_N)
        if NEEDS_DW:
            scale = tl.load(scale_ptr + sample * scale_stride + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dw_ptr + out, dyn * (1.0 + scale), mask=mask)
        if NEEDS_DSCALE:
            if HAS_WEIGHT:
                dyn *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dscale_ptr + out, dyn, mask=mask)
