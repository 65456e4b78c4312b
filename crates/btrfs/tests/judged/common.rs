//! What the judged tests share: opening with a record of the reports, and the verdict.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId, VolumeReport};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::compare::compare;
use offshoot_testkit::host::HostFilesystem;
use offshoot_vfs::{FileId, FileSystem, FileType, Result};

/// The top level of a volume, which no path leads to.
pub(crate) const TOP: SubvolumeId = SubvolumeId::FS;

/// What the engine reported.
#[derive(Clone, Default)]
pub(crate) struct CollectedReports(Arc<Mutex<Vec<VolumeReport>>>);

impl CollectedReports {
    pub(crate) fn all(&self) -> Vec<VolumeReport> {
        self.0.lock().expect("no test panics while it reports").clone()
    }

    /// Options that record reports here.
    pub(crate) fn options(&self) -> EngineOptions {
        let all = self.0.clone();
        let record = move |report: &VolumeReport| {
            all.lock().expect("no test panics while it reports").push(report.clone());
        };
        EngineOptions { reporter: Some(Arc::new(record)), ..EngineOptions::default() }
    }

    /// Opens a volume and records its reports here from now on.
    pub(crate) fn open(&self, devices: Vec<Arc<dyn BlockDevice>>) -> Result<Arc<BtrfsVolume>> {
        BtrfsVolume::open(devices, &self.options())
    }

    /// Fails unless one report contains all of `words`.
    #[track_caller]
    pub(crate) fn assert_said(&self, words: &[&str]) {
        let all = self.all();
        let said = |report: &VolumeReport| {
            let text = report.to_string();
            words.iter().all(|word| text.contains(word))
        };
        assert!(all.iter().any(said), "no report says {words:?} among {}", show(&all));
    }

    /// Fails if there are reports.
    #[track_caller]
    pub(crate) fn assert_silent(&self) {
        let all = self.all();
        assert!(all.is_empty(), "a sound volume was reported on: {}", show(&all));
    }
}

fn show(reports: &[VolumeReport]) -> String {
    let lines: Vec<_> = reports.iter().take(20).map(|report| format!("\n  {report}")).collect();
    format!("{} reports:{}", reports.len(), lines.concat())
}

/// Opens a volume with all its members.
pub(crate) fn open(
    devices: Vec<Arc<dyn BlockDevice>>,
) -> Result<(Arc<BtrfsVolume>, CollectedReports)> {
    let reports = CollectedReports::default();
    Ok((BtrfsVolume::open(devices, &reports.options())?, reports))
}

/// Opens a volume of which some members may be missing.
pub(crate) fn open_degraded(
    devices: Vec<Arc<dyn BlockDevice>>,
) -> Result<(Arc<BtrfsVolume>, CollectedReports)> {
    let reports = CollectedReports::default();
    let options = EngineOptions { is_degraded: true, ..reports.options() };
    Ok((BtrfsVolume::open(devices, &options)?, reports))
}

/// The subvolume that a mount without options shows.
pub(crate) fn default_filesystem(volume: &Arc<BtrfsVolume>) -> Filesystem {
    let id = volume.default_subvolume().expect("a default subvolume");
    volume.filesystem(id).expect("the default subvolume opens")
}

/// Requires of a sound volume with all its members that the kernel shows the same, and that the
/// engine reports nothing.
#[track_caller]
pub(crate) fn judge(disks: &Disks, at_least: u64) {
    let mount = disks.mount("ro,noatime");
    let (volume, reports) = open(disks.devices()).expect("the volume opens");
    compare(&default_filesystem(&volume), mount.path()).assert_same(at_least);
    reports.assert_silent();
}

/// The file at a path below the root of `fs`.
#[track_caller]
pub(crate) fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    path.split('/').fold(fs.root(), |dir, name| {
        fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

/// All bytes of a regular file.
pub(crate) fn contents(fs: &dyn FileSystem, file: FileId) -> Result<Vec<u8>> {
    let size = usize::try_from(fs.attr(file)?.size).expect("a small file");
    let mut bytes = vec![0xa5; size];
    let count = fs.read(file, 0, &mut bytes)?;
    assert_eq!(count, size, "a short read inside the file");
    Ok(bytes)
}

/// Counts the results of a walk over a damaged volume.
#[derive(Debug, Default)]
pub(crate) struct WalkCounts {
    /// Regular files that were read and were right.
    pub(crate) right: u64,
    /// Files and directories that could not be read.
    pub(crate) failed: u64,
    /// The texts of the errors.
    pub(crate) errors: Vec<String>,
}

/// Walks everything. What `fs` returns must be what the judge's mount at `path` shows. What `fs`
/// cannot return must be an error, and the walk continues with the next file.
#[track_caller]
pub(crate) fn assert_never_wrong(fs: &dyn FileSystem, path: &Path) -> WalkCounts {
    let judge = HostFilesystem::new(path).expect("the mount opens");
    let mut seen = WalkCounts::default();
    let mut stack = vec![(fs.root(), judge.root())];
    while let Some((ours, theirs)) = stack.pop() {
        let truth = judge.attr(theirs).expect("the judge reads its volume");
        let checked = match truth.file_type {
            FileType::Directory => {
                let mut names = Vec::new();
                let read = fs.read_dir(ours, 0, &mut |entry| {
                    names.push((entry.name.to_vec(), entry.file));
                    ControlFlow::Continue(())
                });
                for (name, file) in names {
                    let there = judge.lookup(theirs, &name).expect("an entry that is not there");
                    stack.push((file, there));
                }
                read
            }
            FileType::Regular => fs.attr(ours).and_then(|attr| {
                assert_eq!((attr.size, attr.mtime), (truth.size, truth.mtime), "wrong attributes");
                if attr.size > 8 << 20 {
                    return Ok(());
                }
                let expected = contents(&judge, theirs).expect("the judge reads its volume");
                assert!(contents(fs, ours)? == expected, "wrong data was returned");
                seen.right += 1;
                Ok(())
            }),
            _ => fs.attr(ours).map(drop),
        };
        if let Err(error) = checked {
            seen.failed += 1;
            seen.errors.push(error.to_string());
        }
    }
    seen
}

/// The reports that contain none of `words`.
pub(crate) fn reports_besides(reports: &CollectedReports, words: &[&str]) -> Vec<String> {
    let texts = reports.all().iter().map(ToString::to_string).collect::<Vec<_>>();
    texts.into_iter().filter(|text| !words.iter().any(|word| text.contains(word))).collect()
}
