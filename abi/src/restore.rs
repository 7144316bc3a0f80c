//! Tables the restart flow prepares for the restorer.
