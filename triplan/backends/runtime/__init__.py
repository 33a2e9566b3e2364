"""How any kernel is built and launched; nothing here knows a family."""
