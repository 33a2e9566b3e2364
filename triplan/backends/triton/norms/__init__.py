"""rms_norm, layer_norm and l2_norm, forward and backward."""
