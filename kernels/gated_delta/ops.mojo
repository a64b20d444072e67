"""The graph ops under the names that MAX documents: check, then dispatch to the target.

Operand names, order and `execute` parameters are those of MAX's documentation, so that its own
wrappers and layers run on these ops. verify_width is read for its length only, the number of
drafts K.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from .checks import (
    check_conv,
    check_conv_fold,
    check_conv_ring,
    check_fold,
    check_fold_ids,
    check_gates,
    check_offsets,
    check_offsets_length,
    check_recurrence,
    check_ring,
    check_ring_rows,
    check_row_ids,
)
from .cpu.conv1d import conv1d
from .cpu.conv1d_ring import conv_fold, record_inputs
from .cpu.gates import gates
from .cpu.recurrence import recurrence
from .cpu.state_fold import state_fold
from .cpu.vector import fill_zero, untracked
from .gpu.conv1d_ring import conv1d_fold_gpu, conv1d_verify_ring_gpu
from .gpu.gates import gates_gpu
from .gpu.launch import conv1d_gpu, fold_gpu, recurrence_gpu, verify_ring_gpu, zero_gpu

comptime NO_SILU = "the conv's GPU kernels have no SiLU: put the graph's own after the op"


def run_conv[
    work_dtype: DType, state_dtype: DType, //, silu: Bool, target: StaticString
](
    op: StaticString,
    output: OutputTensor[dtype=work_dtype, rank=2, ...],
    qkv: InputTensor[dtype=work_dtype, rank=2, ...],
    weight: InputTensor[dtype=work_dtype, rank=2, ...],
    conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
    slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    write_state: Bool,
    ctx: DeviceContext,
) raises:
    comptime assert work_dtype == DType.float32, "the work dtype is float32: cast before the op"
    var batch_size = slot_idx.dim_size(0)
    check_conv(
        op,
        output.shape(),
        qkv.shape(),
        weight.shape(),
        conv_state.shape(),
        slot_idx.shape(),
        offsets.shape(),
    )
    comptime if is_cpu[target]():
        var slots = untracked(slot_idx.unsafe_ptr())
        var row_offsets = untracked(offsets.unsafe_ptr())
        check_offsets(op, row_offsets, batch_size, qkv.dim_size(0))
        check_row_ids(op, "slot_idx", slots, row_offsets, batch_size, conv_state.dim_size(0))
        conv1d[silu](
            untracked(output.unsafe_ptr()),
            untracked(qkv.unsafe_ptr()),
            untracked(weight.unsafe_ptr()),
            untracked(conv_state.unsafe_ptr()),
            slots,
            row_offsets,
            batch_size,
            qkv.dim_size(0),
            qkv.dim_size(1),
            weight.dim_size(1),
            write_state,
        )
    else:
        comptime assert not silu, NO_SILU
        if write_state:
            conv1d_gpu[True](op, output, qkv, weight, conv_state, slot_idx, offsets, ctx)
        else:
            conv1d_gpu[False](op, output, qkv, weight, conv_state, slot_idx, offsets, ctx)


@extensibility.register("gated_delta_conv1d_fwd")
struct GatedDeltaConv1dFwd[write_state: Bool = True, silu: Bool = False]:
    @staticmethod
    def execute[
        work_dtype: DType, state_dtype: DType, target: StaticString
    ](
        conv_output_ragged: OutputTensor[dtype=work_dtype, rank=2, ...],
        qkv_input_ragged: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_weight: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
        slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        run_conv[silu=Self.silu, target=target](
            "gated_delta_conv1d_fwd",
            conv_output_ragged,
            qkv_input_ragged,
            conv_weight,
            conv_state,
            slot_idx,
            input_row_offsets,
            Self.write_state,
            ctx,
        )


@extensibility.register("gated_delta_conv1d_verify_fwd")
struct GatedDeltaConv1dVerifyFwd[rollback: Bool, silu: Bool = False]:
    @staticmethod
    def execute[
        work_dtype: DType, state_dtype: DType, target: StaticString
    ](
        conv_output_ragged: OutputTensor[dtype=work_dtype, rank=2, ...],
        qkv_input_ragged: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_weight: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
        slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        verify_width: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime OP = "gated_delta_conv1d_verify_fwd"
        var drafts = verify_width.dim_size(0)

        comptime if Self.rollback:
            # Without drafts the forward launch wrote the window already.
            if drafts == 0:
                comptime if is_cpu[target]():
                    fill_zero(untracked(conv_output_ragged.unsafe_ptr()), conv_output_ragged.size())
                else:
                    zero_gpu(conv_output_ragged, ctx)
                return
        run_conv[silu=Self.silu, target=target](
            OP,
            conv_output_ragged,
            qkv_input_ragged,
            conv_weight,
            conv_state,
            slot_idx,
            input_row_offsets,
            Self.rollback or drafts == 0,
            ctx,
        )


@extensibility.register("gated_delta_recurrence_fwd")
struct GatedDeltaRecurrenceFwd[block: Bool = False]:
    @staticmethod
    def execute[
        work_dtype: DType, state_dtype: DType, target: StaticString
    ](
        recurrence_output: OutputTensor[dtype=work_dtype, rank=2, ...],
        qkv_conv_output: InputTensor[dtype=work_dtype, rank=2, ...],
        decay_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
        beta_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
        recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
        slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert work_dtype == DType.float32, "the work dtype is float32: cast before the op"
        comptime OP = "gated_delta_recurrence_fwd"
        var batch_size = slot_idx.dim_size(0)
        var num_tokens = qkv_conv_output.dim_size(0)
        var geometry = check_recurrence(
            OP,
            recurrence_output.shape(),
            qkv_conv_output.shape(),
            decay_per_token.shape(),
            beta_per_token.shape(),
            recurrent_state.shape(),
            slot_idx.shape(),
            input_row_offsets.shape(),
        )
        comptime if is_cpu[target]():
            var slots = untracked(slot_idx.unsafe_ptr())
            var offsets = untracked(input_row_offsets.unsafe_ptr())
            check_offsets(OP, offsets, batch_size, num_tokens)
            check_row_ids(OP, "slot_idx", slots, offsets, batch_size, recurrent_state.dim_size(0))
            # Without a ring: no row is short enough to record.
            recurrence[block=Self.block](
                geometry,
                untracked(recurrence_output.unsafe_ptr()),
                untracked(qkv_conv_output.unsafe_ptr()),
                untracked(decay_per_token.unsafe_ptr()),
                untracked(beta_per_token.unsafe_ptr()),
                untracked(recurrent_state.unsafe_ptr()),
                slots,
                offsets,
                batch_size,
                num_tokens,
                untracked(recurrence_output.unsafe_ptr()),
                slots,
                ring_len=0,
                record_stride=0,
            )
        else:
            recurrence_gpu[Self.block](
                OP,
                geometry,
                recurrence_output,
                qkv_conv_output,
                decay_per_token,
                beta_per_token,
                recurrent_state,
                slot_idx,
                input_row_offsets,
                ctx,
            )


@extensibility.register("gated_delta_recurrence_verify_ring_fwd")
struct GatedDeltaRecurrenceVerifyRingFwd[block: Bool = False]:
    @staticmethod
    def execute[
        work_dtype: DType, state_dtype: DType, ring_dtype: DType, target: StaticString
    ](
        recurrence_output: OutputTensor[dtype=work_dtype, rank=2, ...],
        qkv_conv_output: InputTensor[dtype=work_dtype, rank=2, ...],
        decay_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
        beta_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
        recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
        ring: MutableInputTensor[dtype=ring_dtype, rank=4, ...],
        slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        ring_slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        verify_width: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert work_dtype == DType.float32, "the work dtype is float32: cast before the op"
        comptime OP = "gated_delta_recurrence_verify_ring_fwd"
        var drafts = verify_width.dim_size(0)
        var batch_size = slot_idx.dim_size(0)
        var num_tokens = qkv_conv_output.dim_size(0)
        var geometry = check_recurrence(
            OP,
            recurrence_output.shape(),
            qkv_conv_output.shape(),
            decay_per_token.shape(),
            beta_per_token.shape(),
            recurrent_state.shape(),
            slot_idx.shape(),
            input_row_offsets.shape(),
        )
        # Without drafts this is the plain recurrence, and the ring is not even looked at.
        if drafts > 0:
            check_ring(OP, geometry, ring.shape(), drafts)
            check_ring_rows(OP, slot_idx.shape(), ring_slot_idx.shape())
        comptime if is_cpu[target]():
            var slots = untracked(slot_idx.unsafe_ptr())
            var ring_slots = untracked(ring_slot_idx.unsafe_ptr())
            var offsets = untracked(input_row_offsets.unsafe_ptr())
            check_offsets(OP, offsets, batch_size, num_tokens)
            check_row_ids(OP, "slot_idx", slots, offsets, batch_size, recurrent_state.dim_size(0))
            if drafts > 0:
                check_row_ids(
                    OP, "ring_slot_idx", ring_slots, offsets, batch_size, ring.dim_size(0)
                )
            recurrence[block=Self.block](
                geometry,
                untracked(recurrence_output.unsafe_ptr()),
                untracked(qkv_conv_output.unsafe_ptr()),
                untracked(decay_per_token.unsafe_ptr()),
                untracked(beta_per_token.unsafe_ptr()),
                untracked(recurrent_state.unsafe_ptr()),
                slots,
                offsets,
                batch_size,
                num_tokens,
                untracked(ring.unsafe_ptr()),
                ring_slots,
                ring_len=ring.dim_size(2) if drafts > 0 else 0,
                record_stride=ring.dim_size(3),
            )
        else:
            if drafts == 0:
                recurrence_gpu[Self.block](
                    OP,
                    geometry,
                    recurrence_output,
                    qkv_conv_output,
                    decay_per_token,
                    beta_per_token,
                    recurrent_state,
                    slot_idx,
                    input_row_offsets,
                    ctx,
                )
            else:
                verify_ring_gpu[Self.block](
                    OP,
                    geometry,
                    recurrence_output,
                    qkv_conv_output,
                    decay_per_token,
                    beta_per_token,
                    recurrent_state,
                    ring,
                    slot_idx,
                    ring_slot_idx,
                    input_row_offsets,
                    ctx,
                )


@extensibility.register("gated_delta_state_fold")
struct GatedDeltaStateFold[block: Bool = False]:
    @staticmethod
    def execute[
        state_dtype: DType, ring_dtype: DType, target: StaticString
    ](
        recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
        ring: MutableInputTensor[dtype=ring_dtype, rank=4, ...],
        row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
        ring_row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
        num_accepted: InputTensor[dtype=DType.uint32, rank=1, ...],
        verify_width: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime OP = "gated_delta_state_fold"
        var drafts = verify_width.dim_size(0)
        if drafts == 0:
            return
        var layers = row_ids.dim_size(0)
        var batch_size = num_accepted.dim_size(0)
        var ring_len = ring.dim_size(2)
        var geometry = check_fold(
            OP,
            recurrent_state.shape(),
            ring.shape(),
            row_ids.shape(),
            ring_row_ids.shape(),
            num_accepted.shape(),
            drafts,
        )
        comptime if is_cpu[target]():
            var rows = untracked(row_ids.unsafe_ptr())
            var ring_rows = untracked(ring_row_ids.unsafe_ptr())
            var accepted = untracked(num_accepted.unsafe_ptr())
            check_fold_ids(
                OP,
                "row_ids",
                rows,
                accepted,
                layers,
                batch_size,
                recurrent_state.dim_size(0),
                ring_len,
            )
            check_fold_ids(
                OP,
                "ring_row_ids",
                ring_rows,
                accepted,
                layers,
                batch_size,
                ring.dim_size(0),
                ring_len,
            )
            state_fold[block=Self.block](
                geometry,
                untracked(recurrent_state.unsafe_ptr()),
                untracked(ring.unsafe_ptr()),
                rows,
                ring_rows,
                accepted,
                layers,
                batch_size,
                ring_len,
                ring.dim_size(3),
            )
        else:
            fold_gpu(
                OP,
                geometry,
                recurrent_state,
                ring,
                row_ids,
                ring_row_ids,
                num_accepted,
                ctx,
            )


@extensibility.register("gated_delta_conv1d_verify_ring_fwd")
struct GatedDeltaConv1dVerifyRingFwd[silu: Bool = False]:
    """Ours, not MAX's: the conv of a verify that records its inputs for gated_delta_conv1d_fold."""

    @staticmethod
    def execute[
        work_dtype: DType, state_dtype: DType, ring_dtype: DType, target: StaticString
    ](
        conv_output_ragged: OutputTensor[dtype=work_dtype, rank=2, ...],
        qkv_input_ragged: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_weight: InputTensor[dtype=work_dtype, rank=2, ...],
        conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
        conv_ring: MutableInputTensor[dtype=ring_dtype, rank=3, ...],
        slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        ring_slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
        input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        verify_width: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime OP = "gated_delta_conv1d_verify_ring_fwd"
        var drafts = verify_width.dim_size(0)
        var batch_size = slot_idx.dim_size(0)
        var num_tokens = qkv_input_ragged.dim_size(0)
        var conv_dim = qkv_input_ragged.dim_size(1)
        # Without drafts this is the plain conv, and the ring is not even looked at.
        if drafts > 0:
            check_conv_ring(OP, conv_ring.shape(), conv_dim, drafts)
            check_ring_rows(OP, slot_idx.shape(), ring_slot_idx.shape())
        comptime if is_cpu[target]():
            var slots = untracked(slot_idx.unsafe_ptr())
            var ring_slots = untracked(ring_slot_idx.unsafe_ptr())
            var offsets = untracked(input_row_offsets.unsafe_ptr())
            if drafts > 0:
                check_offsets_length(OP, batch_size, input_row_offsets.shape())
                check_offsets(OP, offsets, batch_size, num_tokens)
                check_row_ids(
                    OP, "ring_slot_idx", ring_slots, offsets, batch_size, conv_ring.dim_size(0)
                )
            run_conv[silu=Self.silu, target=target](
                OP,
                conv_output_ragged,
                qkv_input_ragged,
                conv_weight,
                conv_state,
                slot_idx,
                input_row_offsets,
                drafts == 0,
                ctx,
            )
            if drafts > 0:
                record_inputs(
                    untracked(conv_output_ragged.unsafe_ptr()),
                    untracked(qkv_input_ragged.unsafe_ptr()),
                    untracked(conv_state.unsafe_ptr()),
                    untracked(conv_ring.unsafe_ptr()),
                    slots,
                    ring_slots,
                    offsets,
                    batch_size,
                    num_tokens,
                    conv_dim,
                    conv_state.dim_size(2),
                    conv_ring.dim_size(1),
                )
        else:
            if drafts == 0:
                run_conv[silu=Self.silu, target=target](
                    OP,
                    conv_output_ragged,
                    qkv_input_ragged,
                    conv_weight,
                    conv_state,
                    slot_idx,
                    input_row_offsets,
                    True,
                    ctx,
                )
            else:
                comptime assert not Self.silu, NO_SILU
                check_conv(
                    OP,
                    conv_output_ragged.shape(),
                    qkv_input_ragged.shape(),
                    conv_weight.shape(),
                    conv_state.shape(),
                    slot_idx.shape(),
                    input_row_offsets.shape(),
                )
                conv1d_verify_ring_gpu(
                    OP,
                    conv_output_ragged,
                    qkv_input_ragged,
                    conv_weight,
                    conv_state,
                    conv_ring,
                    slot_idx,
                    ring_slot_idx,
                    input_row_offsets,
                    ctx,
                )


@extensibility.register("gated_delta_conv1d_fold")
struct GatedDeltaConv1dFold:
    """Ours, not MAX's: the accepted inputs into the conv windows of every layer."""

    @staticmethod
    def execute[
        state_dtype: DType, ring_dtype: DType, target: StaticString
    ](
        conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
        conv_ring: MutableInputTensor[dtype=ring_dtype, rank=3, ...],
        row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
        ring_row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
        num_accepted: InputTensor[dtype=DType.uint32, rank=1, ...],
        verify_width: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime OP = "gated_delta_conv1d_fold"
        var drafts = verify_width.dim_size(0)
        if drafts == 0:
            return
        var layers = row_ids.dim_size(0)
        var batch_size = num_accepted.dim_size(0)
        var ring_len = conv_ring.dim_size(1)
        check_conv_fold(
            OP,
            conv_state.shape(),
            conv_ring.shape(),
            row_ids.shape(),
            ring_row_ids.shape(),
            num_accepted.shape(),
            drafts,
        )
        comptime if is_cpu[target]():
            var rows = untracked(row_ids.unsafe_ptr())
            var ring_rows = untracked(ring_row_ids.unsafe_ptr())
            var accepted = untracked(num_accepted.unsafe_ptr())
            check_fold_ids(
                OP,
                "row_ids",
                rows,
                accepted,
                layers,
                batch_size,
                conv_state.dim_size(0),
                ring_len,
            )
            check_fold_ids(
                OP,
                "ring_row_ids",
                ring_rows,
                accepted,
                layers,
                batch_size,
                conv_ring.dim_size(0),
                ring_len,
            )
            conv_fold(
                untracked(conv_state.unsafe_ptr()),
                untracked(conv_ring.unsafe_ptr()),
                rows,
                ring_rows,
                accepted,
                layers,
                batch_size,
                conv_state.dim_size(1),
                conv_state.dim_size(2),
                ring_len,
            )
        else:
            conv1d_fold_gpu(conv_state, conv_ring, row_ids, ring_row_ids, num_accepted, ctx)


@extensibility.register("gated_delta_gates")
struct GatedDeltaGates:
    """Ours, not MAX's: decay and beta from the projections, in float32."""

    @staticmethod
    def execute[
        a_dtype: DType, b_dtype: DType, target: StaticString
    ](
        decay_per_token: OutputTensor[dtype=DType.float32, rank=2, ...],
        beta_per_token: OutputTensor[dtype=DType.float32, rank=2, ...],
        a: InputTensor[dtype=a_dtype, rank=2, ...],
        b: InputTensor[dtype=b_dtype, rank=2, ...],
        A_log: InputTensor[dtype=DType.float32, rank=1, ...],
        dt_bias: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        check_gates(
            "gated_delta_gates",
            decay_per_token.shape(),
            beta_per_token.shape(),
            a.shape(),
            b.shape(),
            A_log.shape(),
            dt_bias.shape(),
        )
        comptime if is_cpu[target]():
            gates(
                untracked(decay_per_token.unsafe_ptr()),
                untracked(beta_per_token.unsafe_ptr()),
                untracked(a.unsafe_ptr()),
                untracked(b.unsafe_ptr()),
                untracked(A_log.unsafe_ptr()),
                untracked(dt_bias.unsafe_ptr()),
                a.dim_size(0),
                a.dim_size(1),
            )
        else:
            gates_gpu(decay_per_token, beta_per_token, a, b, A_log, dt_bias, ctx)
