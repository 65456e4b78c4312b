//! Recipes: how a volume is made, mounted and filled.
//!
//! ```no_run
//! # use offshoot_testkit::btrfs::{judges, recipe::Recipe};
//! # let judges = judges::require().unwrap();
//! let disks = Recipe::new()
//!     .devices(3)
//!     .mkfs("-d raid1c3 -m raid1c3 --csum xxhash")
//!     .mount("compress=zstd")
//!     .make(&judges);
//! ```

use std::path::Path;

use crate::btrfs::disks::{AttachedImages, Disks};
use crate::btrfs::fill;
use crate::btrfs::judges::Judges;
use crate::run::run;

/// How to make a volume. Everything that is not set is as `mkfs.btrfs` and the kernel do it.
#[derive(Clone, Debug)]
pub struct Recipe {
    devices: usize,
    mib: u64,
    mkfs: &'static str,
    mount: &'static str,
    fill: fn(&Path),
    tune: Vec<&'static str>,
}

impl Default for Recipe {
    fn default() -> Self {
        Self::new()
    }
}

impl Recipe {
    /// One device, filled with [`fill::everything`].
    #[must_use]
    pub fn new() -> Self {
        Self { devices: 1, mib: 512, mkfs: "", mount: "", fill: fill::everything, tune: Vec::new() }
    }

    /// How many members the volume has.
    #[must_use]
    pub fn devices(mut self, count: usize) -> Self {
        self.devices = count;
        self
    }

    /// The size of each member in MiB.
    #[must_use]
    pub fn mib(mut self, mib: u64) -> Self {
        self.mib = mib;
        self
    }

    /// Options of `mkfs.btrfs`, separated by spaces.
    #[must_use]
    pub fn mkfs(mut self, options: &'static str) -> Self {
        self.mkfs = options;
        self
    }

    /// The mount options while the volume is filled.
    #[must_use]
    pub fn mount(mut self, options: &'static str) -> Self {
        self.mount = options;
        self
    }

    /// The function that fills the volume.
    #[must_use]
    pub fn fill(mut self, fill: fn(&Path)) -> Self {
        self.fill = fill;
        self
    }

    /// Adds a run of `btrfstune` with these options over the first member, after the volume is
    /// filled. Runs happen in the order in which they are added.
    #[must_use]
    pub fn tune(mut self, options: &'static str) -> Self {
        self.tune.push(options);
        self
    }

    /// Makes the volume, and unmounts it.
    #[must_use]
    pub fn make(&self, judges: &Judges) -> Disks {
        let disks = Disks::create(judges, self.devices, self.mib);
        disks.mkfs(&self.mkfs.split_whitespace().collect::<Vec<_>>());
        // With `noatime`, reading the volume does not change it.
        let mount = disks.mount(&format!("rw,noatime,{}", self.mount));
        (self.fill)(mount.path());
        mount.sync();
        drop(mount);
        for options in &self.tune {
            let mut args: Vec<&std::ffi::OsStr> =
                options.split_whitespace().map(AsRef::as_ref).collect();
            // The tool finds the other members if all of them are block devices.
            let attached = AttachedImages::new(disks.images());
            args.push(attached.devices()[0].as_ref());
            run("btrfstune", &args);
        }
        disks
    }
}
