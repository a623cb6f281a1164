"""Operations where weights have adapters, and the kernels that they run through."""
