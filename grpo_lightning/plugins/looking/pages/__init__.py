"""Pages of HTML: templates, styles and scripts."""
