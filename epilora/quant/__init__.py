"""Low-precision formats: facts, typed operands, plain-torch reference arithmetic and the weight manifest."""
