//! `cargo xtask demo`: offshoot on a volume that the Linux kernel made.

use std::path::Path;

use offshoot_testkit::fixture;

use crate::shell::{Result, cargo, run, target_dir};

/// Builds the program, unpacks the carried volume and shows what is in it.
pub(crate) fn demo() -> Result {
    cargo(&["build", "--quiet", "--release", "--package", "offshoot"])?;
    let target = target_dir();
    let dir = target.join("demo");
    std::fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let image = dir.join("kernel.btrfs");
    fixture::unpack(&image).map_err(|error| format!("{}: {error}", fixture::VOLUME))?;

    let program = target.join("release/offshoot");
    let volume = shorter(&image);
    let place = |path: &str| format!("{volume}:{path}");
    println!("\nThe volume: made by the kernel, unpacked from {}\n", fixture::VOLUME);
    let offshoot = |args: &[&str]| -> Result {
        run(&shorter(&program), args)?;
        println!();
        Ok(())
    };
    offshoot(&["info", &volume])?;
    offshoot(&["subvolume", "list", &volume])?;
    offshoot(&["ls", "-l", "-R", &volume])?;
    offshoot(&["stat", &place("/home/alice/disk.img")])?;
    offshoot(&["cat", &place("/snapshots/root-before-upgrade/etc/os-release")])?;
    offshoot(&["cat", &place("/root/etc/os-release")])?;
    let out = dir.join("out");
    if out.exists() {
        std::fs::remove_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    }
    offshoot(&["extract", &place("/root/usr"), &shorter(&out)])?;
    run("ls", &["-l", &shorter(&out.join("share/doc"))])
}

/// The path from the root of the repository, where the commands run, if it is below it.
fn shorter(path: &Path) -> String {
    let relative = path.strip_prefix(fixture::repository()).unwrap_or(path);
    relative.display().to_string()
}
