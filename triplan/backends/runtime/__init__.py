"""How any kernel is compiled and launched. Nothing here depends on a family of ops."""
