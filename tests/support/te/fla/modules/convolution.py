def causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
    from megatron_rl.layers.delta_net import causal_conv

    assert (bias, activation, initial_state, output_final_state) == (None, "silu", None, False)
    return causal_conv(x, weight, cu_seqlens)
