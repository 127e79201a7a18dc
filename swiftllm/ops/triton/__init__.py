"""Operations in Triton, for NVIDIA GPUs."""
