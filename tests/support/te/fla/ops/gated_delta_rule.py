def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    from megatron_rl.layers.delta_net import chunked_delta_rule

    assert (initial_state, output_final_state, use_qk_l2norm_in_kernel) == (None, False, False)
    return chunked_delta_rule(q, k, v, g, beta, cu_seqlens)
