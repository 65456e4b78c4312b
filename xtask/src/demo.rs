//! `cargo xtask demo`: a volume made of a directory of the repository, and what is in it.

use std::path::Path;

use offshoot_testkit::fixture;

use crate::shell::{Result, cargo, run, target_dir};

/// The image that the demonstration leaves behind, below the directory of build results.
const IMAGE: &str = "demo/disk.img";

/// Builds the program, makes a volume, fills it and shows what is in it.
pub(crate) fn demo() -> Result {
    cargo(&["build", "--quiet", "--release", "--package", "offshoot"])?;
    let target = target_dir();
    let image = target.join(IMAGE);
    let dir = target.join("demo");
    std::fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;

    let program = target.join("release/offshoot");
    let volume = shorter(&image);
    let place = |path: &str| format!("{volume}:{path}");
    let offshoot = |args: &[&str]| -> Result {
        run(&shorter(&program), args)?;
        println!();
        Ok(())
    };
    println!("\nA volume, made and filled without root and without the kernel's driver\n");
    offshoot(&["mkfs", &volume, "--force", "--size", "1G", "--label", "demo"])?;
    offshoot(&["cp", "-r", "crates", "README.md", &place("/")])?;
    offshoot(&["mkdir", "-p", &place("/home/alice/notes")])?;
    offshoot(&["mv", &place("/README.md"), &place("/home/alice/notes/about.md")])?;
    offshoot(&["ln", "-s", "notes/about.md", &place("/home/alice/about")])?;
    offshoot(&["ls", "-l", "-R", &place("/home")])?;
    offshoot(&["ls", "-l", &volume, &place("/crates/cli/src")])?;
    offshoot(&["info", &volume])?;
    println!("It is yours to play with: {volume}. The kernel mounts it, too.");
    Ok(())
}

/// The path from the root of the repository, where the commands run, if it is below it.
fn shorter(path: &Path) -> String {
    let relative = path.strip_prefix(fixture::repository()).unwrap_or(path);
    relative.display().to_string()
}
