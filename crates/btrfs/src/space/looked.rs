//! Counts what is looked at, so that tests can check that it does not grow with the volume.

/// Counts that this thread looks at one free range, block group or hole of a member.
#[cfg_attr(not(test), expect(clippy::missing_const_for_fn, reason = "it counts in tests"))]
pub(super) fn look() {
    #[cfg(test)]
    LOOKED.with(|looked| looked.set(looked.get() + 1));
}

#[cfg(test)]
thread_local! {
    static LOOKED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How many of them this thread looks at during `work`.
#[cfg(test)]
pub(crate) fn looked_at<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let before = LOOKED.with(std::cell::Cell::get);
    let result = work();
    (LOOKED.with(std::cell::Cell::get) - before, result)
}
