//! Keeps `xfsprogs` of a newer Debian beside those of the system.
//!
//! Debian 12 has `xfsprogs` 6.1 and no backport, and those are too old to judge. So setup unpacks
//! the packages of Debian 13 into `tools/xfsprogs` below the target directory, with their own
//! loader and C library. `apt-get` has its lists there too meanwhile, and checks the signatures of
//! Debian. Nothing else on the machine changes, and it needs no root.
//!
//! ```text
//! tools/xfsprogs/root   the unpacked packages
//! tools/xfsprogs/bin    a script for each program, which calls it with that loader
//! ```

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use offshoot_machine::xfsprogs::{XFS_PROGRAMS, XFSPROGS_AT_LEAST, XfsProgs, kept_xfsprogs};

use crate::apt;
use crate::shell::{Result, run};

const SUITE: &str = "trixie";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The package, and those of the libraries that its programs load.
const PACKAGES: [&str; 15] = [
    "xfsprogs",
    "libc6",
    "libblkid1",
    "libbsd0",
    "libcap2",
    "libdevmapper1.02.1",
    "libedit2",
    "libinih1",
    "libmd0",
    "libpcre2-8-0",
    "libselinux1",
    "libtinfo6",
    "libudev1",
    "liburcu8t64",
    "libuuid1",
];

/// Whether `xfsprogs` that are new enough are missing.
pub(crate) fn are_xfsprogs_missing() -> bool {
    XfsProgs::newest().is_none_or(|progs| progs.version() < XFSPROGS_AT_LEAST)
}

/// Whether the keys that sign Debian's packages are missing, as on Ubuntu.
pub(crate) fn are_keys_missing() -> bool {
    !Path::new(KEYS).exists()
}

/// What [`keep_xfsprogs`] does, in words.
pub(crate) fn xfsprogs_change() -> String {
    let place = kept_xfsprogs();
    format!("unpack xfsprogs of Debian's suite {SUITE} into {}", place.display())
}

/// Unpacks the packages and writes the scripts.
pub(crate) fn keep_xfsprogs() -> Result {
    if are_keys_missing() {
        return Err(format!("{KEYS} is missing: apt-get install debian-archive-keyring"));
    }
    let place = kept_xfsprogs();
    let (root, packages) = (place.join("root"), place.join("packages"));
    // What an interrupted setup left is not used.
    let _ = fs::remove_dir_all(&place);
    for dir in [&root, &packages.join("lists/partial"), &packages.join("archives/partial")] {
        made(dir, fs::create_dir_all(dir))?;
    }
    let list = packages.join("sources.list");
    let uri = apt::debian_mirror().unwrap_or_else(|| "http://deb.debian.org/debian".to_owned());
    made(&list, fs::write(&list, format!("deb [signed-by={KEYS}] {uri} {SUITE} main\n")))?;
    apt_get(&packages, &["update"])?;
    apt_get(&packages, &[&["download"], &PACKAGES[..]].concat())?;
    for package in files(&packages)?.iter().filter(|path| path.extension() == Some("deb".as_ref()))
    {
        run("dpkg-deb", &["-x".as_ref(), package.as_os_str(), root.as_os_str()])?;
    }
    for unused in [root.join("usr/share"), packages] {
        made(&unused, fs::remove_dir_all(&unused))?;
    }
    write_scripts(&place)
}

/// Runs `apt-get` in `packages`, with its lists there and no part of the system's state.
fn apt_get(packages: &Path, args: &[&str]) -> Result {
    let place = packages.to_str().ok_or("the path of the target directory is not UTF-8")?;
    let options = [
        format!("Dir::Etc::sourcelist={place}/sources.list"),
        "Dir::Etc::sourceparts=-".to_owned(),
        format!("Dir::State={place}"),
        "Dir::State::status=/dev/null".to_owned(),
        format!("Dir::Cache={place}"),
        "APT::Sandbox::User=root".to_owned(),
        // Without it, an update without a network succeeds.
        "APT::Update::Error-Mode=any".to_owned(),
    ];
    let chdir = format!("--chdir={place}");
    let options: Vec<_> = options.iter().flat_map(|option| ["-o", option]).collect();
    run("env", &[&[&chdir, "apt-get", "--quiet"], &options[..], args].concat())
}

fn write_scripts(place: &Path) -> Result {
    let is_loader =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"ld-"));
    let mut loader = None;
    for folder in files(&place.join("root/usr/lib"))?.iter().filter(|path| path.is_dir()) {
        loader = loader.or(files(folder)?.into_iter().find(is_loader));
    }
    let loader = loader.ok_or("the packages hold no loader")?;
    let loader = loader.strip_prefix(place).expect("it is in there").display().to_string();
    let (libraries, _) = loader.rsplit_once('/').expect("it is in a folder");
    let bin = place.join("bin");
    made(&bin, fs::create_dir(&bin))?;
    for program in XFS_PROGRAMS {
        let script = format!(
            "#!/bin/sh\nkept=$(dirname \"$0\")/..\nexec \"$kept/{loader}\" --library-path \
             \"$kept/{libraries}\" \"$kept/root/usr/sbin/{program}\" \"$@\"\n"
        );
        let path = bin.join(program);
        made(&path, fs::write(&path, script))?;
        made(&path, fs::set_permissions(&path, Permissions::from_mode(0o755)))?;
    }
    Ok(())
}

/// The paths of what is in a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = made(folder, fs::read_dir(folder))?;
    entries.map(|entry| Ok(made(folder, entry)?.path())).collect()
}

fn made<T>(path: &Path, result: std::io::Result<T>) -> Result<T> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}
