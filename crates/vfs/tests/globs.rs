//! Patterns in paths, expanded in a filesystem in memory.

use offshoot_testkit::memory::{MemoryFilesystem, ROOT};
use offshoot_vfs::FileType;
use offshoot_vfs::globs::expand;

fn expanded(fs: &MemoryFilesystem, path: &str) -> Vec<String> {
    let found = expand(fs, path.as_bytes()).unwrap();
    found.into_iter().map(|path| String::from_utf8(path).unwrap()).collect()
}

#[test]
fn as_in_a_shell() {
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"od", 300, FileType::Directory);
    fs.add(ROOT, b"other", 301, FileType::Directory);
    for (ino, name) in [(302, "b.c"), (303, "a.c"), (304, ".hidden.c"), (305, "lit*ral")] {
        fs.file(300, name.as_bytes(), ino, b"x");
    }
    fs.file(301, b"a.c", 306, b"x");
    fs.file(ROOT, b"ofile", 307, b"x");
    fs.add(ROOT, b"link", 308, FileType::Symlink).target = b"od".to_vec();
    for (path, found) in [
        ("/od/*.c", &["/od/a.c", "/od/b.c"][..]),
        ("/o*/a.c", &["/od/a.c", "/other/a.c"]),
        ("/od/.*", &["/od/.hidden.c"]),
        ("/od/lit*ral", &["/od/lit*ral"]),
        ("/od/lit\\*r?l", &["/od/lit*ral"]),
        ("/l*/a.c", &["/link/a.c"]),
        ("/*", &["/link", "/od", "/ofile", "/other"]),
        ("/o*/", &["/od/", "/other/"]),
        ("/od/*.h", &["/od/*.h"]),
        ("/none/*", &["/none/*"]),
        ("/od/a.c", &["/od/a.c"]),
    ] {
        assert_eq!(expanded(&fs, path), found, "{path}");
    }
}
