"""``trainctl data``: data sets in the deployment's bucket."""
