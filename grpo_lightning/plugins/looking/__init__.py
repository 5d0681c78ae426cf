"""Looking at runs: records of tokens, pages, reports, exports, loggers."""
