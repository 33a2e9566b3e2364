"""Problems that the tests of several files share."""
