//! Makes a volume from a directory of the host, and a read-only snapshot of it:
//! `build_and_snapshot new.img directory`. The same directory makes the same files.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use offshoot::{CreateOptions, OpenOptions, Timestamp, Volume};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args_os().skip(1);
    let usage = "usage: build_and_snapshot IMAGE DIRECTORY";
    let (image, directory) = (args.next().ok_or(usage)?, args.next().ok_or(usage)?);
    let opened = OpenOptions::new()
        .owner(0, 0)
        .time(Timestamp { secs: 1_700_000_000, nanos: 0 })
        .compress("zstd:3");
    let options = CreateOptions::new().label("built").opened(opened);
    let volume = Volume::create(image, 1 << 30, &options)?;
    volume.create_subvolume("/current")?;
    copy(&volume, directory.as_ref(), "/current".as_ref())?;
    volume.snapshot("/current", "/first", true)?;
    volume.sync()?;
    Ok(())
}

fn copy(volume: &Volume, from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    let mut entries = fs::read_dir(from)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        let file_type = entry.file_type()?;
        if file_type.is_dir() {
            volume.create_dir(&to)?;
            copy(volume, &from, &to)?;
        } else if file_type.is_symlink() {
            volume.symlink(fs::read_link(&from)?, &to)?;
        } else if file_type.is_file() {
            volume.write(&to, fs::read(&from)?)?;
        }
    }
    Ok(())
}
