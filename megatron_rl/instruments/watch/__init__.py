"""Shows running runs in a terminal or on a page: reads run directories that another process writes."""
