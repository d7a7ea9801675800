"""What `process.triton_product` does to fp32 matrices: python -m tests.unit.process.programs.triton_product."""

from megatron_rl.process import fp32_products, triton_product

if __name__ == "__main__":
    fp32_products.SIZE = 64  # 8 programs, in Python
    print(fp32_products.measured(triton_product.product, "cpu"))
