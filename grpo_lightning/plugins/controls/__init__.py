"""Controls of experiments: rewards without a signal, and with a bad one."""
