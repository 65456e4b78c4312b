//! The format that a test runs on. A test of what both formats have runs on both.

use std::cell::Cell;

use offshoot_device::VolumeFormat;

thread_local! {
    static FORMAT: Cell<VolumeFormat> = const { Cell::new(VolumeFormat::Btrfs) };
}

/// Makes a test of each of these functions for each format: `btrfs::mkdir`, `xfs::mkdir`.
macro_rules! on_both {
    ($($test:ident),+ $(,)?) => {
        mod btrfs {
            $(#[test] fn $test() {
                $crate::format::on(offshoot_device::VolumeFormat::Btrfs, super::$test);
            })+
        }
        mod xfs {
            $(#[test] fn $test() {
                $crate::format::on(offshoot_device::VolumeFormat::Xfs, super::$test);
            })+
        }
    };
}
pub(crate) use on_both;

/// Runs a test whose volumes are of this format.
pub(crate) fn on(format: VolumeFormat, test: impl FnOnce()) {
    FORMAT.set(format);
    test();
}

/// The format of this test. A thread that it starts takes it over by [`on`].
pub(crate) fn current() -> VolumeFormat {
    FORMAT.get()
}

pub(crate) fn is_xfs() -> bool {
    current() == VolumeFormat::Xfs
}
