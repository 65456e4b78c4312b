//! The input of `extract`: volumes that the kernel filled with a source tree.
//!
//! The first run makes them and keeps them in the directory of the benchmark. So a later run
//! measures the same bytes in the same places, even if it names another source. A volume has
//! another name until it is complete, so an interrupted run leaves none that looks complete.

use std::fs::File;
use std::path::{Path, PathBuf};

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::loops::{AttachedLoop, LoopMount};
use offshoot_testkit::run::try_run;

use crate::Result;

/// A volume to read.
#[derive(Debug)]
pub(crate) struct InputVolume {
    /// Its name in the table.
    pub(crate) name: &'static str,
    /// Its format, as `mount` calls it.
    pub(crate) format: &'static str,
    /// The image.
    pub(crate) image: PathBuf,
}

/// Makes the volumes that are missing from `source`: one plain, one compressed, one of XFS.
pub(crate) fn prepare(dir: &Path, source: &Path) -> Result<Vec<InputVolume>> {
    [
        ("plain", "btrfs", "noatime"),
        ("zstd", "btrfs", "noatime,compress=zstd"),
        ("xfs", "xfs", "noatime"),
    ]
    .into_iter()
    .map(|(name, format, options)| {
        let image = dir.join(format!("{name}.{format}"));
        let input = InputVolume { name, format, image };
        if !input.image.exists() {
            make(&input, options, source)?;
        }
        Ok(input)
    })
    .collect()
}

fn make(InputVolume { format, image, .. }: &InputVolume, options: &str, source: &Path) -> Result {
    const SIZE_BYTES: u64 = 4 << 30;
    eprintln!("making {}", image.display());
    if !source.exists() {
        return Err(format!(
            "{} is not there: `apt-get install linux-source-6.1` brings the default source",
            source.display()
        ));
    }
    let unfinished = image.with_extension("unfinished");
    File::create(&unfinished)
        .and_then(|file| file.set_len(SIZE_BYTES))
        .map_err(|error| format!("{}: {error}", unfinished.display()))?;
    try_run(&format!("mkfs.{format}"), &["-q".as_ref(), unfinished.as_os_str()])?;
    if *format == "btrfs" {
        fill(&*MountedMembers::try_new(std::slice::from_ref(&unfinished), options)?, source)?;
    } else {
        let attached = vec![AttachedLoop::attach(&unfinished, 512)];
        fill(&LoopMount::new(attached, format, options)?, source)?;
    }
    std::fs::rename(&unfinished, image).map_err(|error| format!("{}: {error}", image.display()))
}

fn fill(mount: &LoopMount, source: &Path) -> Result {
    if source.is_dir() {
        let from = source.join(".");
        try_run("cp", &["-a".as_ref(), from.as_os_str(), mount.path().as_os_str()])?;
    } else {
        let to = mount.path().as_os_str();
        try_run("tar", &["-xf".as_ref(), source.as_os_str(), "-C".as_ref(), to])?;
    }
    mount.sync();
    Ok(())
}
