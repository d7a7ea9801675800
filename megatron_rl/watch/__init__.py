"""A run as it goes on, in a terminal or on a page: reads run directories that another process writes."""
