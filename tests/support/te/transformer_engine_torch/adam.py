"""Adam over lists of tensors."""

import torch

Tensor = torch.Tensor
ADAM_W = 1


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step in place. ``tensor_lists``: gradients, weights, first and second moments [, fp32 master weights].

    ``mode`` 1 is AdamW (decay of the weight itself), 0 adds the decay to the gradient. The update is of the master
    weights where there are some; the weights are then their rounding.
    """
    if not isinstance(step, int):
        raise TypeError(f"multi_tensor_adam: step {step!r} is no int, and the compiled function takes no other number")
    correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, weight, mean, square, *masters in zip(*tensor_lists, strict=True):
        master = masters[0] if masters else weight
        theta, gradient = master.float(), grad.float()
        if mode != ADAM_W:
            gradient = gradient + weight_decay * theta
        first = beta1 * mean.float() + (1 - beta1) * gradient
        second = beta2 * square.float() + (1 - beta2) * gradient.square()
        update = (first / correct1) / ((second / correct2).sqrt() + epsilon)
        if mode == ADAM_W:
            update = update + weight_decay * theta
        theta = theta - lr * update
        mean.copy_(first)
        square.copy_(second)
        master.copy_(theta)
        if masters:
            weight.copy_(theta)
