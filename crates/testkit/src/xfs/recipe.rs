//! Recipes: how a volume is made, filled and compared with what the kernel shows.

use std::path::Path;

use offshoot_vfs::FileSystem;

use crate::compare::{Aspect, Compare, ComparisonOutcome};
use crate::xfs::disk::XfsDisk;
use crate::xfs::fill::{self, XfsFillShape};
use crate::xfs::judges::XfsJudges;
use crate::xfs::matrix::XfsVolumeKind;
use crate::xfs::old;

/// How to make a volume.
#[derive(Clone, Debug)]
pub struct XfsRecipe {
    kind: &'static XfsVolumeKind,
    seed: u64,
    fill: Option<fn(&Path)>,
}

/// A volume with files, unmounted and clean.
#[derive(Debug)]
pub struct FilledXfs {
    /// The volume.
    pub disk: XfsDisk,
    kernel_says: &'static [&'static str],
    /// A volume with the same files that the kernel mounts, if it does not mount this one.
    twin: Option<XfsDisk>,
}

impl XfsRecipe {
    /// A volume of this kind, filled with [`fill::everything`], or with [`fill::some`] if the
    /// kernel does not mount it.
    #[must_use]
    pub fn new(kind: &'static XfsVolumeKind) -> Self {
        Self { kind, seed: 0x0f5, fill: None }
    }

    /// Other random contents.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The function that fills the volume.
    #[must_use]
    pub fn fill(mut self, fill: fn(&Path)) -> Self {
        self.fill = Some(fill);
        self
    }

    /// Makes the volume, fills it, and unmounts it. `xfs_repair` finds nothing in it.
    #[must_use]
    pub fn make(&self, judges: &XfsJudges) -> FilledXfs {
        let kind = self.kind;
        let disk = XfsDisk::create(judges, kind.mib);
        let twin = if kind.is_mounted {
            disk.mkfs(kind.mkfs);
            self.fill_mounted(&disk);
            None
        } else {
            let twin = XfsDisk::create(judges, kind.mib);
            twin.mkfs("");
            let seed = self.seed;
            let mount = twin.mount("rw,noatime", &[]);
            self.fill.map_or_else(|| fill::some(mount.path(), seed), |fill| fill(mount.path()));
            old::mkfs_with(&disk, kind.mkfs, mount.path());
            drop(mount);
            Some(twin)
        };
        if !kind.changes.is_empty() {
            disk.change_with_xfs_db(kind.changes);
        }
        disk.assert_checks();
        FilledXfs { disk, kernel_says: kind.kernel_says, twin }
    }

    fn fill_mounted(&self, disk: &XfsDisk) {
        let shape = XfsFillShape::of(disk);
        // With `noatime`, reading the volume does not change it.
        let mount = disk.mount("rw,noatime", self.kind.kernel_says);
        match self.fill {
            Some(fill) => fill(mount.path()),
            None => fill::everything(mount.path(), disk, &shape, self.seed),
        }
        mount.sync();
    }
}

impl FilledXfs {
    /// Compares `ours` with what the kernel shows of the volume, path by path. For a volume that
    /// the kernel does not mount, it is what the kernel shows of a volume with the same files: all
    /// but inode numbers, times, holes and the order of names.
    ///
    /// The kernel shows unwritten extents as holes until something has read them. So the judge is
    /// mounted anew each time.
    #[must_use]
    pub fn compare(&self, ours: &dyn FileSystem) -> ComparisonOutcome {
        self.compare_without(&[], ours)
    }

    /// The same without these aspects.
    #[must_use]
    pub fn compare_without(&self, aspects: &[Aspect], ours: &dyn FileSystem) -> ComparisonOutcome {
        let (disk, kernel_says, compare) = match &self.twin {
            None => (&self.disk, self.kernel_says, Compare::default()),
            Some(twin) => {
                let not_copied = [Aspect::ModificationTimes, Aspect::Holes, Aspect::DirectorySize];
                let compare = Compare::of_copies();
                (twin, &[][..], not_copied.into_iter().fold(compare, Compare::without))
            }
        };
        let compare = aspects.iter().copied().fold(compare, Compare::without);
        let mount = disk.mount("ro,noatime", kernel_says);
        compare.run(ours, mount.path())
    }
}
