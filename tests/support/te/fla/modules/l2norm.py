def l2norm(x, eps=1e-6):
    return (x.float() * (x.float().square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
